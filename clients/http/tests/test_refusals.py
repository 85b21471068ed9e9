"""Refusals of the server as HTTP tells them, who may call, and which model answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
from icehouse_client import IcehouseClientError
from icehouse_http.errors import Dialect, api_error
from icehouse_server.config import SecurityConfig
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.rpc.fake_engine import MODEL_INFO, overloaded
from tests.unit.rpc.calls.test_wire import watched_server
from tests.unit.rpc.conftest import RunningServer, running
from tests.unit.rpc.services.test_adapters import ADAPTERS

SAID: Any = [{"role": "user", "content": "Hi"}]
STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
}


@pytest.mark.parametrize("name", STATUS)
def test_every_code_has_its_status(name: str) -> None:
    error = api_error(
        IcehouseClientError(
            grpc.StatusCode[name],
            "why",
            reason="REASON",
            metadata={},
            field="prompt.chat.messages[0]",
            retry_after_s=None,
        )
    )
    assert error.status == STATUS[name]
    assert ("retry-after" in error.headers) == (name == "UNAVAILABLE")
    for dialect in Dialect:
        told = error.body(dialect)["error"]
        assert (told["code"], told["param"], told["message"]) == ("REASON", "messages[0]", "why")


async def chat(front: HttpFront, **options: Any) -> Any:
    asked = {"model": "tiny", "max_tokens": 1, **options}
    return await front.openai.chat.completions.create(messages=SAID, **asked)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_full_queue_says_when_to_come_again(
    front: HttpFront, served: RunningServer, stream: bool
) -> None:
    served.engine.refusal = overloaded()
    with pytest.raises(openai.RateLimitError) as caught:
        await chat(front, stream=stream)
    assert caught.value.code == "QUEUE_FULL"
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.response.headers["retry-after-ms"] == "1500"
    with pytest.raises(anthropic.RateLimitError) as told:
        await front.anthropic.messages.create(model="tiny", max_tokens=1, messages=SAID, stream=stream)
    assert told.value.response.json()["error"]["type"] == "rate_limit_error"


async def test_a_refusal_names_the_field_as_the_caller_knows_it(
    front: HttpFront, served: RunningServer
) -> None:
    served.engine.refusal = InvalidRequest(
        Reason.PARAMETER_OUT_OF_RANGE, "temperature is 9", field="sampling.temperature"
    )
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(front)
    assert (caught.value.code, caught.value.param) == ("PARAMETER_OUT_OF_RANGE", "temperature")
    assert caught.value.type == "invalid_request_error"


TURN: Any = {"role": "user", "content": "Hi"}
CALL: Any = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
THIRD = "prompt.chat.messages[2].content"
"""Of the messages that the server is sent."""
LATER: Any = {"type": "web_search"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "dry"}


def flat(name: str) -> Any:
    return {"type": "function", "name": name}


NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"messages": [TURN] * 3}, THIRD, "messages[2].content"),
    ("/v1/chat/completions", {}, "prompt.chat", "messages"),
    (
        "/v1/chat/completions",
        {"messages": [TURN, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TURN]},
        "prompt.chat.messages[1].tool_calls[0].arguments_json",
        "messages[1].tool_calls[0]",
    ),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        "prompt.tools[0].parameters_json",
        "tools[0].function.parameters",
    ),
    ("/v1/chat/completions", {}, "completions", "n"),
    ("/v1/chat/completions", {}, "prompt.chat.template_arguments", "chat_template_kwargs"),
    ("/v1/messages", {"messages": [TURN] * 3}, THIRD, "messages[2].content"),
    ("/v1/messages", {"system": "Be kind.", "messages": [TURN] * 2}, THIRD, "messages[1].content"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [RESULT, RESULT]}, TURN]},
        THIRD,
        "messages[1].content",
    ),
    ("/v1/messages", {"system": "Be kind."}, "prompt.chat.messages[0].content", "system"),
    ("/v1/messages/count_tokens", {"system": "Be kind."}, "prompt.chat.messages[0].content", "system"),
    ("/v1/messages", {}, "stop[3]", "stop_sequences[3]"),
    (
        "/v1/messages",
        {"tools": [{"name": "found", "defer_loading": True}, {"name": "look"}]},
        "prompt.tools[0].parameters_json",
        "tools[1].input_schema",
    ),
    ("/v1/responses", {"input": "Hi"}, "prompt.chat.messages[0].content", "input"),
    ("/v1/responses", {"input": [TURN] * 3}, THIRD, "input[2]"),
    ("/v1/responses", {"instructions": "Be kind.", "input": [TURN] * 2}, THIRD, "input[1]"),
    ("/v1/responses", {"instructions": "Be kind."}, "prompt.chat.messages[0].content", "instructions"),
    (
        "/v1/responses",
        {"tools": [LATER, {"type": "namespace", "name": "lake", "tools": [flat("go"), flat("dig")]}]},
        "prompt.tools[1].parameters_json",
        "tools[1].tools[1].parameters",
    ),
    ("/v1/responses", {}, "response_format.json_schema", "text.format.schema"),
    ("/v1/completions", {}, "prompt.tokens.ids[3]", "prompt"),
]


@pytest.mark.parametrize(("path", "more", "field", "name"), NAMED)
async def test_a_refusal_counts_as_the_caller_does(
    front: HttpFront, served: RunningServer, path: str, more: dict[str, Any], field: str, name: str
) -> None:
    refusal = InvalidRequest(Reason.CHAT_INVALID, f"{field} is not good; not {field}s", field=field)
    served.engine.refusal = served.engine.order_answer = refusal
    for stream in (False, True):
        asked = {"model": "tiny", "max_tokens": 1, "messages": [TURN], "input": "Hi"}
        if path == "/v1/completions":
            asked["prompt"] = "Hi"
        answer = await front.http.post(path, json=asked | more | {"stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == name
        assert error["message"] == f"{name} is not good; not {field}s"


async def test_a_server_that_loads_or_is_not_there_is_unavailable() -> None:
    async with running(ready=False) as served, front_of(served.server.address) as front:
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(front)
        assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
        assert (await front.http.get("/health")).status_code == 503
    async with front_of(served.server.address) as front:
        with pytest.raises(anthropic.APIStatusError) as told:
            await front.anthropic.messages.create(model="tiny", max_tokens=1, messages=SAID)
        assert told.value.status_code == 503
        assert told.value.response.json()["error"]["type"] == "overloaded_error"
        assert (await front.http.get("/health")).json() == {"status": "UNAVAILABLE"}


async def test_a_server_that_serves_is_healthy(front: HttpFront) -> None:
    answer = await front.http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "SERVING"})


async def test_the_callers_token_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token = new_token()
    file.write_text(line_of(token, tenant="red", role=CallerRole.TENANT, expire_date=None) + "\n")
    file.chmod(0o600)
    async with (
        running(security=SecurityConfig(token_file=str(file))) as served,
        front_of(served.server.address) as front,
    ):
        with pytest.raises(openai.AuthenticationError) as caught:
            await front.openai.models.list()
        assert caught.value.code == "CREDENTIALS_INVALID"
        assert (await front.http.get("/metrics")).status_code == 200, "which needs no token"
        body = {"model": "tiny", "max_tokens": 1, "messages": SAID}
        answer = await front.http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert answer.json()["error"]["code"] == "CREDENTIALS_MISSING"
        unsendable = {"x-api-key": "s\xffcret".encode("latin-1")}
        assert (await front.http.get("/v1/models", headers=unsendable)).status_code == 401
        for headers in ({"authorization": f"Bearer {token}"}, {"x-api-key": token}):
            for path in ("/v1/messages", "/v1/chat/completions"):
                answer = await front.http.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
    assert {request.tenant for request in served.engine.submitted} == {"red"}


async def test_any_name_is_answered_by_the_served_model_unless_names_are_strict(
    served: RunningServer,
) -> None:
    async with front_of(served.server.address, aliases={"gpt-5": "tiny", "gone": "other"}) as front:
        for name in ("gpt-5", "claude", "tiny", ""):
            assert (await chat(front, model=name)).model == "tiny"
        assert [model.id for model in (await front.openai.models.list()).data] == ["tiny", "gpt-5"]
        assert (await front.openai.models.retrieve("gpt-5")).id == "gpt-5"
        assert [model.id for model in (await front.anthropic.models.list()).data] == ["tiny", "gpt-5"]
    async with front_of(served.server.address, aliases={"gpt-5": "tiny"}, strict_models=True) as front:
        for name in ("gpt-5", "tiny"):
            assert (await chat(front, model=name)).model == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            await chat(front, model="claude")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_an_adapters_name_chooses_it() -> None:
    info = dataclasses.replace(MODEL_INFO, adapters=ADAPTERS)
    async with running(info=info) as served, front_of(served.server.address) as front:
        names = [model.id for model in (await front.openai.models.list()).data]
        assert names == ["tiny", *(adapter.name for adapter in ADAPTERS)]
        for name in names:
            await chat(front, model=name)
    assert [request.adapter for request in served.engine.submitted] == ["", *names[1:]]


async def test_what_names_the_conversation_is_its_session(front: HttpFront, served: RunningServer) -> None:
    await chat(front, prompt_cache_key="talk-1")
    await chat(front, prompt_cache_key="no session, that", extra_headers={"session_id": "talk-2"})
    await chat(front, prompt_cache_key="no session, that")
    assert [request.session_id for request in served.engine.submitted] == ["talk-1", "talk-2", ""]


async def test_agents_headers_name_session_agent_and_parent() -> None:
    named = [
        ({"x-claude-code-session-id": "s1", "x-claude-code-agent-id": "a1"}, ("s1", "a1", "")),
        ({"session-id": "s2", "thread-id": "t2"}, ("s2", "t2", "")),
        ({"x-session-affinity": "s3"}, ("s3", "", "")),
        ({"x-opencode-session": "s4", "thread-id": "no name"}, ("s4", "", "")),
        ({"x-session-affinity": "s5", "x-parent-session-id": "s3"}, ("s5", "", "s3")),
    ]
    async with watched_server() as (served, notes), front_of(served.server.address) as front:
        for headers, _ in named:
            await chat(front, extra_headers=headers)
        for headers, _ in named:  # without a token
            asked = {"messages": SAID, "max_tokens": 1}
            await front.http.post("/v1/chat/completions", json=asked, headers=headers)
        # Beside these, the front asks for the models once.
        await notes.ended(2 * len(named) + 1)
        calls = [call for call in notes.calls if call.method.endswith("/Stream")]
        found = [(call.session_id, call.agent_id, call.parent_session_id) for call in calls]
        assert found == 2 * [told for _, told in named]


async def test_options_arrive(served: RunningServer) -> None:
    async with front_of(served.server.address, temperature=0.5) as front:
        await chat(
            front,
            top_p=0,
            seed=-1,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={"7": 3},
            stop=["x", "y"],
            extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5},
        )
    [request] = served.engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 3, 0.1)
    assert 0 < sampling.top_p < 1e-6 and sampling.seed == (1 << 64) - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert sampling.repetition_penalty == 1.5 and dict(sampling.logit_bias) == {7: 3.0}
    assert request.stop == ("x", "y")
