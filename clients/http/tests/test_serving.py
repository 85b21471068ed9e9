"""What is counted, bounded and logged of every request, whatever its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from icehouse_http.bounds.pace import Pace
from icehouse_http.serving.access_log import REFUSAL_LINE_BURST_COUNT, REFUSAL_LINES_PER_S, AccessLog
from icehouse_http.serving.metrics import Metrics
from icehouse_server.config import ConnectionConfig, SecurityConfig
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token
from prometheus_client.parser import text_string_to_metric_families

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import hanging
from tests.unit.rpc.conftest import RunningServer, running

CHAT: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
SECRET = "sk-of-a-caller"


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return each series of a page of metrics: its name, then the values of its labels in order."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def metrics(front: HttpFront) -> dict[tuple[str, ...], float]:
    answer = await front.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


def ended(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return what the access log's lines say, in order."""
    return [vars(record) for record in caplog.records if record.getMessage() == "http_request_ended"]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "icehouse.http"):
        yield caplog


async def test_requests_are_counted_by_path_protocol_and_status(front: HttpFront) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert (await front.http.post(path, json=CHAT)).status_code == 200
        assert (await front.http.post(path, content=b"no JSON")).status_code == 400
    for name in ("/a", "/b", "/v1/models/none", "/v1/models/nothing"):
        assert (await front.http.get(name)).status_code == 404
    counted = await metrics(front)
    total = "icehouse_http_requests_total"
    assert counted[total, "/v1/chat/completions", "openai", "200"] == 1
    assert counted[total, "/v1/messages", "anthropic", "400"] == 1
    assert (
        counted[total, "other", "none", "404"] == counted[total, "/v1/models/{model}", "openai", "404"] == 2
    )
    waited = "icehouse_http_first_byte_seconds"
    assert counted[f"{waited}_count", "/v1/messages"] == 1
    assert counted[f"{waited}_bucket", "+Inf", "/v1/messages"] == 1
    # Nothing but this very request is left.
    assert counted["icehouse_http_in_flight_requests",] == 1
    assert counted["icehouse_http_body_bytes",] == 0


def test_a_wait_is_in_the_bucket_of_its_bound_and_in_those_above() -> None:
    page = Metrics()
    for duration_s in (0.005, 0.3, 99.0):
        page.first_byte(path="/a", duration_s=duration_s)
    counted = samples(page.text(held_bytes=0, limit_bytes=1))
    name = "icehouse_http_first_byte_seconds_bucket"
    found = [counted[name, bound, "/a"] for bound in ("0.005", "0.25", "0.5", "60.0", "+Inf")]
    assert found == [1, 1, 2, 2, 3]


async def test_a_request_has_one_line_without_what_was_said_or_who_said_it(
    front: HttpFront, served: RunningServer, log: pytest.LogCaptureFixture
) -> None:
    answer = await front.http.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": SECRET})
    await front.http.get("/health")
    await front.http.get("/v1/none%0Aforged?key=value")
    chat, other = ended(log)
    assert (chat["method"], chat["path"], chat["status"]) == ("POST", "/v1/chat/completions", 200)
    assert chat["sent_bytes"] == len(answer.content) and chat["body_bytes"] > 0
    assert 0 < chat["first_byte_s"] <= chat["duration_s"]
    assert (
        chat["request_id"] == answer.json()["id"] == served.engine.submitted[0].request_id.partition("@")[0]
    )
    assert other["path"] == "/v1/none%0Aforged" and other["status"] == 404
    assert SECRET not in log.text and "Hi" not in str(chat)


async def test_a_caller_who_goes_is_a_line_too(
    front: HttpFront, served: RunningServer, log: pytest.LogCaptureFixture
) -> None:
    served.engine.script = hanging
    async with front.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        async for _ in answer.aiter_lines():
            break
    await served.cancelled()
    async with asyncio.timeout(BOUND_S):
        while not ended(log):
            await asyncio.sleep(0)
    [line] = ended(log)
    assert line["status"] == 200 and line["sent_bytes"] > 0


async def test_without_an_access_log_there_is_no_line(
    served: RunningServer, log: pytest.LogCaptureFixture
) -> None:
    async with front_of(served.server.address, has_access_log=False) as front:
        assert (await front.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert ended(log) == []


def test_refusals_cannot_fill_the_disk(log: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    lines = AccessLog(lambda: now_s)
    for _ in range(REFUSAL_LINE_BURST_COUNT + 7):
        lines.write({"status": 404}, is_refusal=True)
    assert len(ended(log)) == REFUSAL_LINE_BURST_COUNT
    lines.write({"status": 200}, is_refusal=False)
    now_s = 1 / REFUSAL_LINES_PER_S
    lines.write({"status": 404}, is_refusal=True)
    *_, answered, refused = ended(log)
    assert "left_out" not in answered and refused["left_out"] == 7


async def test_bodies_of_all_requests_are_bounded_together(served: RunningServer) -> None:
    """One that does not fit is refused while the others run, and taken when one of them has ended."""
    served.engine.script = hanging
    body = CHAT | {"stream": True, "user": "u" * 600}
    async with front_of(served.server.address, body_memory_bytes=1_500) as front:
        async with contextlib.AsyncExitStack() as running_streams:
            for _ in range(2):
                stream = front.http.stream("POST", "/v1/chat/completions", json=body)
                assert (await running_streams.enter_async_context(stream)).status_code == 200
            assert 1_200 < (await metrics(front))["icehouse_http_body_bytes",] <= 1_500
            for path, kind in (
                ("/v1/chat/completions", "server_error"),
                ("/v1/messages", "overloaded_error"),
            ):
                refused = await front.http.post(path, json=body)
                assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == (kind, "BODY_MEMORY_FULL")
            # What has no body is answered.
            assert (await front.http.get("/v1/models")).status_code == 200
        await served.cancelled()
        async with asyncio.timeout(BOUND_S):
            while (await metrics(front))["icehouse_http_body_bytes",]:
                pass
        async with front.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200


async def test_a_refusal_that_is_kept_back_holds_no_body(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_back = asyncio.Event()

    def for_ever(*arguments: Any, **options: Any) -> float:
        kept_back.set()
        return 1e6

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    monkeypatch.setattr(Pace, "delay_s", for_ever)
    async with front_of(served.server.address, max_body_bytes=1_000) as front, asyncio.timeout(BOUND_S):
        asking = asyncio.create_task(front.http.post("/v1/messages", content=pieces()))
        await kept_back.wait()
        while (await metrics(front))["icehouse_http_body_bytes",]:
            pass
        assert not asking.done()
        asking.cancel()


async def test_streams_of_some_callers_do_not_keep_the_calls_of_others_back() -> None:
    """gRPC holds back what exceeds the server's limit for one connection, of which the front has several.

    On each of them the watch of health is one call.
    """
    async with (
        running(connection=ConnectionConfig(stream_limit=3)) as served,
        front_of(served.server.address) as front,
        contextlib.AsyncExitStack() as streams,
    ):
        served.engine.script = hanging
        for _ in range(3):
            stream = front.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
            assert (await streams.enter_async_context(stream)).status_code == 200
        assert (await front.http.get("/health")).json() == {"status": "SERVING"}


async def test_health_that_wants_credentials_is_asked_for_with_those_of_the_caller(tmp_path: Path) -> None:
    token = new_token()
    file = tmp_path / "tokens"
    file.write_text(line_of(token, tenant="search", role=CallerRole.TENANT, expire_date=None))
    file.chmod(0o600)
    security = SecurityConfig(token_file=str(file), health_open=False)
    async with (
        running(security=security) as served,
        front_of(served.server.address, watches_health=False) as front,
    ):
        assert (await front.http.get("/health")).json() == {"status": "CREDENTIALS_MISSING"}
        known = {"authorization": f"Bearer {token}"}
        assert (await front.http.get("/health", headers=known)).json() == {"status": "SERVING"}
        answer = await front.http.post("/v1/chat/completions", json=CHAT, headers=known)
        assert answer.status_code == 200


async def test_a_fault_of_the_front_is_told_to_its_log_alone(
    front: HttpFront, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("a secret of the front")

    monkeypatch.setattr("icehouse_http.app.model_list", broken)
    answer = await front.http.get("/v1/models")
    assert answer.status_code == 500 and "secret" not in answer.text
    (record,) = (each for each in log.records if each.getMessage() == "http_request_failed")
    assert vars(record)["path"] == "/v1/models" and record.exc_info is not None
