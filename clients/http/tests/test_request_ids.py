"""Request ids: each answer has one, in headers that the packages read and in the logs of front and server."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anthropic
import openai
import pytest

from clients.http.tests.fronts import HttpFront, front_of
from clients.http.tests.test_serving import ended
from clients.http.tests.test_streams import ASKED, each_protocol
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import counting, hanging
from tests.unit.rpc.conftest import RunningServer

OWN = "trace-7:a.b"
CHAT: Any = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}


def names_of(served: RunningServer) -> list[str]:
    """Return what the requests are called at the server."""
    return [request.name for request in served.engine.submitted]


@each_protocol
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_has_its_requests_name_and_a_caller_may_choose_it(
    front: HttpFront,
    served: RunningServer,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
) -> None:
    with caplog.at_level(logging.INFO, "icehouse.http"):
        body = ASKED[path] | {"stream": stream}
        first = await front.http.post(path, json=body)
        second = await front.http.post(path, json=body, headers={"x-request-id": OWN})
        async with asyncio.timeout(BOUND_S):  # a line comes when the answer's last byte has gone
            while len(ended(caplog)) < 2:
                await asyncio.sleep(0)
    told = [answer.headers["x-request-id"] for answer in (first, second)]
    assert told == names_of(served) == [line["request_id"] for line in ended(caplog)]
    assert told[0] in first.text and told[1] == OWN and OWN not in second.text
    if path == "/v1/messages":
        assert [answer.headers["request-id"] for answer in (first, second)] == told


async def test_the_packages_show_it(front: HttpFront, served: RunningServer) -> None:
    chat = await front.openai.chat.completions.create(**CHAT)
    message = await front.anthropic.messages.create(**CHAT)
    assert [chat._request_id, message._request_id] == names_of(served)
    with pytest.raises(openai.BadRequestError) as refused:
        await front.openai.chat.completions.create(**CHAT, n=0, extra_headers={"x-request-id": OWN})
    assert refused.value.request_id == OWN
    with pytest.raises(anthropic.BadRequestError) as denied:
        await front.anthropic.messages.create(**{**CHAT, "messages": []})
    assert (denied.value.request_id or "").startswith("req_")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/none", 404),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages", 400),
        ("POST", "/v1/messages/count_tokens", 400),
        ("POST", "/v1/embeddings", 400),
    ],
)
async def test_whatever_is_answered_has_one(front: HttpFront, method: str, path: str, status: int) -> None:
    for sent, told in ((OWN, OWN), ("no name", "req_"), ("", "req_"), ("a" * 129, "req_")):
        answer = await front.http.request(method, path, headers={"x-request-id": sent})
        assert answer.status_code == status
        assert answer.headers["x-request-id"].startswith(told)


async def test_requests_of_one_name_run_beside_each_other(front: HttpFront, served: RunningServer) -> None:
    """A gateway may give all that it asks for one of its own callers the same."""
    served.engine.script = hanging
    asking = [
        asyncio.ensure_future(front.http.post(path, json=ASKED[path], headers={"x-request-id": OWN}))
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions")
    ]
    while len(served.engine.submitted) < len(asking):
        await asyncio.sleep(0)
    first, *others = names_of(served)
    assert first == OWN and all(name.startswith(f"{OWN}-") for name in others) and len(set(others)) == 2
    for request in served.engine.submitted:
        _, _, *rest = counting(request)
        served.engine.publish(request, *rest)
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_texts_are_embedded_and_ranked_under_the_callers_name(whole: HttpFront) -> None:
    """Also beside a request of that name."""
    asked: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": ["ice", "steam"] * 20},
        "/v1/rerank": {
            "query": "q",
            "documents": ["ice"] * 20,
            "positive_answer": "y",
            "negative_answer": "n",
        },
    }
    headers = {"x-request-id": OWN}
    answers = await asyncio.gather(
        *(whole.http.post(path, json={"model": "m", **asked[path]}, headers=headers) for path in [*asked] * 2)
    )
    assert [(a.status_code, a.headers["x-request-id"]) for a in answers] == [(200, OWN)] * 4


async def test_pages_may_read_it(served: RunningServer) -> None:
    async with front_of(served.server.address, allow_origins=("https://a.example",)) as front:
        answer = await front.http.get("/v1/models", headers={"origin": "https://a.example"})
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id"} <= set(exposed) and "x-request-id" in answer.headers
