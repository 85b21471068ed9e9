"""ServerService: what a server says of itself, the requests it has, and which of them a caller may end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from icehouse.v1 import embedding_service_pb2, server_service_pb2
from icehouse.v1 import inference_service_pb2 as inference
from icehouse_server.config import CacheConfig, Config, FleetConfig, ModelConfig, SecurityConfig
from icehouse_server.domain.events import Delta, Event
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token
from icehouse_server.rpc.messages import field_checks
from icehouse_server.rpc.services.server_service import server_proto

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import finished, hanging, started
from tests.unit.rpc.access.test_tokens import ADS, BOSS, SEARCH, bearer, guarded_server
from tests.unit.rpc.conftest import RunningServer, running
from tests.unit.rpc.services.test_embedding_service import EMBEDDING

GET = server_service_pb2.GetServerRequest()
LIST = server_service_pb2.ListRequestsRequest()


def cancel(request_id: str, *, tenant: str | None = None) -> server_service_pb2.CancelRequestRequest:
    return server_service_pb2.CancelRequestRequest(request_id=request_id, tenant=tenant)


async def test_a_server_says_what_it_is_while_it_loads_too() -> None:
    async with running(ready=False, max_completions=3) as served:
        loading = (await served.serving.GetServer(GET)).server
    async with running() as served:
        served.clock.now += 5
        ready = (await served.serving.GetServer(GET)).server
    assert (loading.state, ready.state) == (
        server_service_pb2.SERVER_STATE_LOADING,
        server_service_pb2.SERVER_STATE_READY,
    )
    assert loading.version == ready.version != ""
    assert (loading.limits.max_completions, ready.limits.max_completions) == (3, 16)
    assert ready.uptime.ToNanoseconds() == 5_000_000_000
    assert ready.limits.max_output_tokens == 32768 and ready.limits.max_message_bytes == 16 << 20


@pytest.mark.parametrize(
    ("config", "features"),
    [
        (Config(cache=CacheConfig(enabled=False, key_file="k")), []),
        (Config(cache=CacheConfig(ssd_enabled=False, key_file="k")), ["PREFIX_CACHE"]),
        (Config(), ["PREFIX_CACHE", "SSD_CACHE"]),
        (
            Config(
                cache=CacheConfig(key_file="k"),
                security=SecurityConfig(token_file="t"),
                model=ModelConfig(draft_model="d"),
                fleet=FleetConfig(worker_enabled=True),
            ),
            ["PREFIX_CACHE", "SSD_CACHE", "CACHE_ENCRYPTION", "CREDENTIALS", "DRAFT_MODEL", "WORKER"],
        ),
    ],
)
def test_features_are_those_of_the_configuration(config: Config, features: list[str]) -> None:
    names = [server_service_pb2.ServerFeature.Name(feature) for feature in server_proto(config).features]
    assert names == [f"SERVER_FEATURE_{name}" for name in features]


async def test_watching_repeats_the_counters(served: RunningServer) -> None:
    often = server_service_pb2.WatchStatsRequest(interval=Duration(nanos=100_000_000))
    watch = served.serving.WatchStats(often)
    first = (await watch.read()).stats
    served.engine.stats = dataclasses.replace(served.engine.stats, step_total=8)
    second = (await watch.read()).stats
    assert (first.engine.step_total, second.engine.step_total) == (7, 8)
    watch.cancel()


async def test_the_counters_are_answered_as_they_are_watched(served: RunningServer) -> None:
    once = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
    watch = served.serving.WatchStats(server_service_pb2.WatchStatsRequest())
    watched = (await watch.read()).stats
    watch.cancel()
    assert once.engine.step_total == 7
    once.ClearField("collect_time")
    watched.ClearField("collect_time")
    assert once == watched


@pytest.mark.parametrize("interval", [Duration(), Duration(seconds=-1), Duration(seconds=3601)])
async def test_watch_interval_has_a_range(served: RunningServer, interval: Duration) -> None:
    watch: Any = served.serving.WatchStats(server_service_pb2.WatchStatsRequest(interval=interval))
    answer = await refused(watch.read())
    assert (answer.reason, answer.field) == ("PARAMETER_OUT_OF_RANGE", "interval")


@pytest.fixture
async def busy() -> AsyncIterator[RunningServer]:
    """A server whose engine begins and does not end: "wait" has not begun, "two" has two outputs."""
    async with running() as served:
        served.engine.script = lambda request: () if request.request_id == "wait" else hanging(request)
        yield served


async def begun(call: Any) -> Any:
    """Return a stream whose first word has arrived."""
    while (await call.read()).WhichOneof("event") != "delta":
        pass
    return call


async def test_requests_are_listed_with_how_far_they_are(busy: RunningServer) -> None:
    waiting = busy.inference.Stream(
        inference.GenerateRequest(prompt={"text": "abc"}, request_id="wait", session_id="s")
    )
    while not busy.engine.submitted:
        await busy.settle()
    two = inference.GenerateRequest(
        prompt={"text": "ab"},
        request_id="two",
        completions=2,
        max_output_tokens=9,
        sampling={"temperature": 1.0},
    )
    await begun(busy.inference.Stream(two))
    await busy.settle()
    busy.clock.now += 3
    first, second = (await busy.serving.ListRequests(LIST)).requests
    assert (first.request_id, first.session_id, first.prompt_tokens) == ("wait", "s", 3)
    assert (first.phase, first.output_tokens) == (server_service_pb2.REQUEST_PHASE_WAITING, 0)
    assert first.age.ToNanoseconds() == 3_000_000_000
    assert (second.request_id, second.method) == ("two", "icehouse.v1.InferenceService/Stream")
    assert (second.phase, second.part_count) == (server_service_pb2.REQUEST_PHASE_DECODING, 2)
    assert (second.prompt_tokens, second.max_output_tokens) == (2, 9), "the prompt of two outputs counts once"
    assert second.output_tokens >= 1 and second.cached_tokens >= 3
    waiting.cancel()


async def test_a_cancelled_request_ends_with_why(busy: RunningServer) -> None:
    call = await begun(
        busy.inference.Stream(inference.GenerateRequest(prompt={"text": "ab"}, request_id="one"))
    )
    ended = (await busy.serving.CancelRequest(cancel("one"))).request
    assert (ended.request_id, ended.prompt_tokens) == ("one", 2)
    assert await busy.cancelled() == "one"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert "ended by CancelRequest" in (caught.value.details() or "")
    assert not (await busy.serving.ListRequests(LIST)).requests
    again = await refused(busy.serving.CancelRequest(cancel("one")))
    assert (again.code, again.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")


async def test_all_parts_of_a_request_are_cancelled(busy: RunningServer) -> None:
    two = inference.GenerateRequest(
        prompt={"text": "ab"}, request_id="two", completions=2, sampling={"temperature": 1.0}
    )
    await begun(busy.inference.Stream(two))
    await busy.serving.CancelRequest(cancel("two"))
    assert len({await busy.cancelled(), await busy.cancelled()}) == 2


async def test_pages_go_on_where_the_last_one_ended(busy: RunningServer) -> None:
    calls = [
        await begun(
            busy.inference.Stream(inference.GenerateRequest(prompt={"text": "ab"}, request_id=f"r{index}"))
        )
        for index in range(3)
    ]
    page = await busy.serving.ListRequests(server_service_pb2.ListRequestsRequest(page_size=2))
    rest = await busy.serving.ListRequests(
        server_service_pb2.ListRequestsRequest(page_size=2, page_token=page.next_page_token)
    )
    assert [r.request_id for r in page.requests] == ["r0", "r1"]
    assert ([r.request_id for r in rest.requests], rest.next_page_token) == (["r2"], "")
    for call in calls:
        call.cancel()


async def test_a_page_is_never_longer_than_the_longest(
    busy: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_checks, "PAGE_SIZE_LIMIT", 2)
    calls = [
        await begun(busy.inference.Stream(inference.GenerateRequest(prompt={"text": "ab"}, request_id=name)))
        for name in "abc"
    ]
    page = await busy.serving.ListRequests(server_service_pb2.ListRequestsRequest(page_size=2_000_000))
    assert [r.request_id for r in page.requests] == ["a", "b"] and page.next_page_token
    for call in calls:
        call.cancel()


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("ListRequests", server_service_pb2.ListRequestsRequest(page_size=-1), "page_size"),
        ("ListRequests", server_service_pb2.ListRequestsRequest(page_token="x"), "page_token"),
        ("ListRequests", server_service_pb2.ListRequestsRequest(page_token="9" * 20), "page_token"),
        ("CancelRequest", cancel(""), "request_id"),
        ("CancelRequest", cancel("not a name"), "request_id"),
    ],
)
async def test_what_cannot_be_is_refused(
    served: RunningServer, method: str, request_message: Any, field: str
) -> None:
    found = await refused(getattr(served.serving, method)(request_message))
    assert (found.code, found.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_tenant_sees_and_ends_its_own_and_an_operator_all(tmp_path: Path) -> None:
    tokens = {name: new_token() for name in ("red", "blue", "boss")}
    lines = [
        line_of(
            token,
            tenant=name,
            role=CallerRole.OPERATOR if name == "boss" else CallerRole.TENANT,
            expire_date=None,
        )
        for name, token in tokens.items()
    ]
    file = tmp_path / "tokens"
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o600)

    def credentials(name: str) -> Any:
        return {"metadata": [("authorization", f"Bearer {tokens[name]}")]}

    async with running(security=SecurityConfig(token_file=str(file))) as served:
        served.engine.script = hanging
        call = await begun(
            served.inference.Stream(
                inference.GenerateRequest(prompt={"text": "ab"}, request_id="mine"), **credentials("red")
            )
        )
        seen = {
            name: [r.tenant for r in (await served.serving.ListRequests(LIST, **credentials(name))).requests]
            for name in tokens
        }
        assert seen == {"red": ["red"], "blue": [], "boss": ["red"]}
        other = await refused(served.serving.CancelRequest(cancel("mine"), **credentials("blue")))
        nothing = await refused(served.serving.CancelRequest(cancel("none"), **credentials("blue")))
        assert other.reason == nothing.reason == "REQUEST_NOT_FOUND"
        await served.serving.CancelRequest(cancel("mine"), **credentials("boss"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


async def test_what_has_ended_is_not_there_although_its_reader_has_not_taken_it(tmp_path: Path) -> None:
    """Its id is free, and another tenant's by now."""

    def unread(request: GenerationRequest) -> Iterable[Event]:
        yield started(request)
        # Far more than the connection's window holds.
        yield from [Delta("x" * 10_000, (1,))] * 200
        yield finished(request)

    one = inference.GenerateRequest(prompt={"text": "ab"}, request_id="one")
    async with guarded_server(tmp_path, server={"outbox_byte_limit": 1 << 30}) as served:
        served.engine.script = unread
        first = await begun(served.inference.Stream(one, metadata=bearer(SEARCH)))
        await served.settle()
        served.engine.script = hanging
        call = await begun(served.inference.Stream(one, metadata=bearer(ADS)))
        gone = await refused(served.serving.CancelRequest(cancel("one"), metadata=bearer(SEARCH)))
        assert (gone.code, gone.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        listed = (await served.serving.ListRequests(LIST, metadata=bearer(BOSS))).requests
        assert [each.tenant for each in listed] == ["ads"]
        assert served.engine.cancelled.empty() and not first.done()
        await served.serving.CancelRequest(cancel("one"), metadata=bearer(ADS))
        assert await served.cancelled() == "one@ads"
        with pytest.raises(grpc.aio.AioRpcError, match="ended by CancelRequest"):
            await call.read()
        while await first.read() is not grpc.aio.EOF:
            pass


async def test_two_tenants_may_use_one_id_and_each_ends_its_own(tmp_path: Path) -> None:
    one = inference.GenerateRequest(prompt={"text": "ab"}, request_id="one")
    async with guarded_server(tmp_path) as served:
        served.engine.script = hanging
        calls = {
            token: await begun(served.inference.Stream(one, metadata=bearer(token)))
            for token in (SEARCH, ADS)
        }
        again = await refused(served.inference.Generate(one, metadata=bearer(ADS)))
        assert (again.code, again.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
        assert "@" not in again.message
        for token, tenants in ((SEARCH, ["search"]), (ADS, ["ads"]), (BOSS, ["search", "ads"])):
            found = (await served.serving.ListRequests(LIST, metadata=bearer(token))).requests
            assert [(each.request_id, each.tenant) for each in found] == [("one", name) for name in tenants]
        either = await refused(served.serving.CancelRequest(cancel("one"), metadata=bearer(BOSS)))
        assert (either.code, either.field) == (grpc.StatusCode.INVALID_ARGUMENT, "tenant")
        theirs = cancel("one", tenant="ads")
        other = await refused(served.serving.CancelRequest(theirs, metadata=bearer(SEARCH)))
        assert other.reason == "REQUEST_NOT_FOUND" and served.engine.cancelled.empty()
        await served.serving.CancelRequest(theirs, metadata=bearer(BOSS))
        assert await served.cancelled() == "one@ads"
        with pytest.raises(grpc.aio.AioRpcError, match="ended by CancelRequest"):
            await calls[ADS].read()
        await served.serving.CancelRequest(cancel("one"), metadata=bearer(SEARCH))
        assert await served.cancelled() == "one@search"
        with pytest.raises(grpc.aio.AioRpcError, match="ended by CancelRequest"):
            await calls[SEARCH].read()


async def test_inputs_to_embed_are_one_request() -> None:
    async with running(info=EMBEDDING) as served:
        served.engine.script = lambda request: [started(request)]
        request = embedding_service_pb2.EmbedRequest(request_id="e")
        request.inputs.add(text="ab")
        request.inputs.add(text="abcdef")
        embedding = asyncio.ensure_future(served.embeddings.Embed(request))
        while len(served.engine.submitted) < 2 and not embedding.done():
            await served.settle()
        [found] = (await served.serving.ListRequests(LIST)).requests
        assert (found.request_id, found.part_count, found.prompt_tokens) == ("e", 2, 8)
        await served.serving.CancelRequest(cancel("e"))
        assert "ended by CancelRequest" in (await refused(embedding)).message
