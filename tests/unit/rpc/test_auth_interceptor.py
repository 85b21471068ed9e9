"""What one caller leaves open, unread or idle is its own loss: others go on being served."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import (
    cache_service_pb2,
    inference_service_pb2,
    model_service_pb2,
    prompt_pb2,
    server_service_pb2,
)
from icehouse_server.config import Config, ConnectionConfig, SecurityConfig
from icehouse_server.errors import Overloaded
from icehouse_server.rpc.access.credentials import ServerSecurity
from icehouse_server.rpc.auth_interceptor import AuthInterceptor
from icehouse_server.rpc.calls.call_lifecycle import RpcCalls
from icehouse_server.rpc.calls.methods import CallPool, MethodAccess

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import hanging
from tests.fixtures.rpc.http2 import Peer, framed, peer_of
from tests.fixtures.rpc.unread_context import UnreadContext
from tests.fixtures.rpc.worker import METHODS_HERE, worker_parts
from tests.unit.rpc.access.test_tokens import ADS, BOSS, SEARCH, bearer, guarded_server
from tests.unit.rpc.conftest import FakeClock, RunningServer, channel_options

GENERATE = inference_service_pb2.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
WATCH = framed(server_service_pb2.WatchStatsRequest(interval={"seconds": 3600}).SerializeToString())
FEW = {"max_concurrent_calls": 96}
CALL_COUNT = 60
"""On each of three connections: more than a caller's part of any of the places."""
EVERYTHING = {"channelz_enabled": True, "worker": worker_parts()}
"""All that a server may serve."""
FEW_OF_A_CALLER = [name for name, row in METHODS_HERE.items() if row.caller_limit is not None]
FRAME_BYTES = 1 << 14
"""The longest frame that a server takes unasked."""
EXHAUSTED = str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])


async def is_served(served: RunningServer, token: str = ADS) -> bool:
    """Whether another tenant, on a connection of its own, gets each kind of answer."""
    async with grpc.aio.insecure_channel(served.server.address, options=channel_options()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    metadata = bearer(token)
    answer = await served.inference.Generate(GENERATE, metadata=metadata, timeout=BOUND_S)
    stats = server_service_pb2.GetStatsRequest()
    await served.serving.GetStats(stats, metadata=metadata, timeout=BOUND_S)
    watch = served.serving.WatchStats(
        server_service_pb2.WatchStatsRequest(), metadata=metadata, timeout=BOUND_S
    )
    first = await watch.read()
    watch.cancel()
    return bool(answer.text == " w0" and first.HasField("stats"))


@contextlib.asynccontextmanager
async def peers(served: RunningServer, count: int, *, window_bytes: int | None = None) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as opened:
        yield [
            await opened.enter_async_context(peer_of(served.server.address, window_bytes=window_bytes))
            for _ in range(count)
        ]


async def heard(peer: Peer) -> None:
    """Return when the server has taken in all that was sent."""
    number = peer.answered_ping_count() + 1
    await peer.ping(number)
    await peer.answered(number)


async def are_refused(hostile: list[Peer]) -> None:
    """Return when so many of all calls were refused as one connection has sent: their places are full."""

    def is_full() -> bool:
        statuses = [fields.get("grpc-status") for peer in hostile for fields in peer.headers.values()]
        return statuses.count(EXHAUSTED) >= CALL_COUNT

    listening = [asyncio.ensure_future(peer.until(is_full, timeout_s=BOUND_S)) for peer in hostile]
    done, others = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for task in done:
        task.result()


@pytest.mark.parametrize(
    ("path", "token"),
    [
        ("/grpc.health.v1.Health/Check", ""),
        ("/icehouse.v1.InferenceService/Generate", SEARCH),
        ("/icehouse.v1.ServerService/WatchStats", SEARCH),
    ],
    ids=["health", "work", "watch"],
)
async def test_calls_that_never_send_their_message_lock_nobody_out(
    tmp_path: Path, path: str, token: str
) -> None:
    async with guarded_server(tmp_path, server=FEW) as served, peers(served, 3) as hostile:
        for peer in hostile:
            for _ in range(CALL_COUNT):
                await peer.open_call(path, token=token)
        await are_refused(hostile)
        assert await is_served(served)


async def test_watches_that_never_end_lock_nobody_out(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, server=FEW) as served, peers(served, 3) as hostile:
        for peer in hostile:
            for _ in range(CALL_COUNT):
                stream = await peer.open_call("/icehouse.v1.ServerService/WatchStats", token=SEARCH)
                await peer.send(stream, WATCH, end=True)
        await are_refused(hostile)
        assert await is_served(served)
        # Not even the tenant's own requests: what takes no time has places of its own.
        await served.inference.Generate(GENERATE, metadata=bearer(SEARCH), timeout=BOUND_S)


@pytest.mark.parametrize("name", FEW_OF_A_CALLER)
async def test_of_what_costs_others_as_long_as_it_lasts_a_caller_has_a_few(tmp_path: Path, name: str) -> None:
    limit = METHODS_HERE[name].caller_limit
    assert limit is not None and limit <= 16
    async with guarded_server(tmp_path, server=EVERYTHING) as served, peers(served, 2) as hostile:
        # Over however many connections: what counts is who calls.
        opened = [
            (peer, await peer.open_call(f"/{name}", token=SEARCH)) for peer in hostile for _ in range(limit)
        ]

        def refusals() -> list[str]:
            told = [peer.headers.get(stream, {}) for peer, stream in opened]
            return [fields["grpc-message"] for fields in told if fields.get("grpc-status") == EXHAUSTED]

        listening = [asyncio.ensure_future(peer.quiet(BOUND_S)) for peer in hostile]
        async with asyncio.timeout(BOUND_S):
            while len(refusals()) < limit:
                await asyncio.sleep(0)
            assert await is_served(served)
        for task in listening:
            task.cancel()
        assert len(refusals()) == limit
        assert all(f"{limit} {name.partition('/')[2]} calls" in text for text in refusals())


async def test_one_watch_too_many_is_told_when_to_come_back(served: RunningServer) -> None:
    limit = METHODS_HERE["icehouse.v1.ServerService/WatchStats"].caller_limit
    assert limit is not None
    request = server_service_pb2.WatchStatsRequest(interval={"seconds": 3600})
    watches = [served.serving.WatchStats(request) for _ in range(limit)]
    for watch in watches:
        await watch.read()
    refusal = await refused(served.serving.WatchStats(request).read())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refusal.retry.retry_delay.ToMilliseconds() > 0
    assert (refusal.info.metadata["yours"], refusal.info.metadata["limit"]) == (str(limit), str(limit))
    watches.pop().cancel()
    async with asyncio.timeout(BOUND_S):
        while len(watches) < limit:
            with contextlib.suppress(grpc.aio.AioRpcError):  # until the server has heard of it
                watch = served.serving.WatchStats(request)
                await watch.read()
                watches.append(watch)
    for watch in watches:
        watch.cancel()


async def test_a_refused_call_gives_its_places_back_before_its_status_is_read() -> None:
    name = "icehouse.v1.ServerService/WatchStats"
    limit = METHODS_HERE[name].caller_limit
    assert limit is not None
    clock = FakeClock()
    interceptor = AuthInterceptor(
        Config(),
        security=ServerSecurity(SecurityConfig(), clock=clock),
        calls=RpcCalls(clock=clock, on_end=lambda record: ()),
        run_long=asyncio.to_thread,
    )
    served = asyncio.Event()

    async def serve(requests: Any, context: Any) -> None:
        served.set()

    handler = interceptor._guarded(grpc.stream_stream_rpc_method_handler(serve), name)
    # A call takes a place among those of its caller, and then one of all watches, which others hold here.
    watches = interceptor._shares[CallPool.WATCHES]
    with contextlib.ExitStack() as others:
        with contextlib.suppress(Overloaded):
            for number in itertools.count():
                others.enter_context(watches.hold(f"peer:{number}"))
        unread = [UnreadContext() for _ in range(limit)]
        tasks = [asyncio.ensure_future(handler.stream_stream(None, context)) for context in unread]
        statuses = await asyncio.gather(*(context.told for context in unread))
        assert {status.code for status in statuses} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all("watches are in flight" in status.details for status in statuses)
    context = UnreadContext()
    last = asyncio.ensure_future(handler.stream_stream(None, context))
    await asyncio.wait((last, context.told), return_when=asyncio.FIRST_COMPLETED)
    assert served.is_set() and not any(task.done() for task in tasks)
    for task in (*tasks, last):
        task.cancel()


async def test_answers_that_nobody_reads_count_against_who_asked(tmp_path: Path) -> None:
    message = framed(model_service_pb2.ListModelsRequest().SerializeToString())
    async with guarded_server(tmp_path, server=FEW) as served, peers(served, 3, window_bytes=0) as hostile:
        for peer in hostile:
            for _ in range(CALL_COUNT):
                stream = await peer.open_call("/icehouse.v1.ModelService/ListModels", token=SEARCH)
                await peer.send(stream, message, end=True)
        await are_refused(hostile)
        assert await is_served(served)


async def test_requests_that_do_not_fit_into_their_memory_wait_for_their_turn(tmp_path: Path) -> None:
    path = "/icehouse.v1.InferenceService/Generate"
    message = framed(GENERATE.SerializeToString())
    limits = {"request_memory_bytes": 64 << 10, "max_message_bytes": 20 << 10}
    async with guarded_server(tmp_path, server=limits) as served, peers(served, 2) as [slow, quick]:
        first, second = [await slow.open_call(path, token=SEARCH) for _ in range(2)]
        await slow.send(second, message, end=True)
        # What the first may still send is kept for it, and half of all is the most that one tenant gets.
        stream = await quick.open_call(path, token=ADS)
        await quick.send(stream, message, end=True)
        assert await quick.status(stream) == (0, "")
        assert "grpc-status" not in slow.headers.get(second, {})
        await slow.send(first, message, end=True)
        assert await slow.status(first) == (0, "")
        assert await slow.status(second) == (0, "")


async def test_a_request_whose_turn_does_not_come_is_told_why(tmp_path: Path) -> None:
    path = "/icehouse.v1.InferenceService/Generate"
    limits = {"request_memory_bytes": 64 << 10, "max_message_bytes": 64 << 10}
    connection = ConnectionConfig(message_timeout_s=0.3)
    async with (
        guarded_server(tmp_path, server=limits, connection=connection) as served,
        peers(served, 1) as [peer],
    ):
        late = await peer.open_call(path, token=SEARCH)
        assert (await peer.status(late))[0] == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        # One that runs keeps its message's bytes, and then there is no room for another of the longest.
        served.engine.script = hanging
        running = await peer.open_call(path, token=SEARCH)
        await peer.send(running, framed(GENERATE.SerializeToString()), end=True)
        async with asyncio.timeout(BOUND_S):
            while not served.engine.submitted:
                await asyncio.sleep(0)
        code, text = await peer.status(await peer.open_call(path, token=SEARCH))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and "65536 bytes" in text


async def test_a_health_checker_that_sends_nothing_is_given_up_soon(tmp_path: Path) -> None:
    row = METHODS_HERE["grpc.health.v1.Health/Check"]
    assert row.message_timeout_s is not None and row.message_timeout_s <= 2
    async with guarded_server(tmp_path) as served, peers(served, 1) as [peer]:
        code, message = await peer.status(await peer.open_call("/grpc.health.v1.Health/Check"))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0] and "2 s" in message


@pytest.mark.parametrize("name", [name for name, row in METHODS_HERE.items() if row.message_byte_limit])
async def test_a_message_longer_than_its_method_needs_is_refused(tmp_path: Path, name: str) -> None:
    limit = METHODS_HERE[name].message_byte_limit
    assert limit is not None
    async with (
        guarded_server(tmp_path, server=EVERYTHING) as served,
        peers(served, 1) as [peer],
    ):
        stream = await peer.open_call(f"/{name}", token=BOSS)
        message = framed(b"a" * (limit + 1))
        for at in range(0, len(message), FRAME_BYTES):
            await peer.send(stream, message[at : at + FRAME_BYTES])
        code, message = await peer.status(stream)
        assert code == grpc.StatusCode.INVALID_ARGUMENT.value[0] and str(limit) in message


@pytest.mark.parametrize(
    "name", [name for name, row in METHODS_HERE.items() if row.access is MethodAccess.OPERATOR]
)
async def test_what_is_for_operators_is_refused_to_tenants_before_it_is_read(
    tmp_path: Path, name: str
) -> None:
    async with (
        guarded_server(tmp_path, server=EVERYTHING) as served,
        peers(served, 1) as [peer],
    ):
        code, message = await peer.status(await peer.open_call(f"/{name}", token=SEARCH))
        assert code == grpc.StatusCode.PERMISSION_DENIED.value[0] and name.rpartition("/")[2] in message


@pytest.mark.parametrize(
    "name", [name for name, row in METHODS_HERE.items() if row.pool is not CallPool.HEALTH]
)
async def test_nothing_but_health_is_served_to_who_proves_nothing(tmp_path: Path, name: str) -> None:
    async with (
        guarded_server(tmp_path, server=EVERYTHING) as served,
        peers(served, 1) as [peer],
    ):
        code, _ = await peer.status(await peer.open_call(f"/{name}"))
        assert code == grpc.StatusCode.UNAUTHENTICATED.value[0]


async def test_a_callers_commands_take_turns_and_let_anothers_pass(tmp_path: Path) -> None:
    def explain(token_id: int, token: str) -> Any:
        prompt = prompt_pb2.TokenPrompt(ids=[token_id])
        request = cache_service_pb2.ExplainRequest(prompt={"tokens": prompt})
        return asyncio.ensure_future(served.cache.Explain(request, metadata=bearer(token), timeout=BOUND_S))

    async with guarded_server(tmp_path) as served:
        go_on = threading.Event()
        served.engine.call_on_thread(go_on.wait)
        try:
            many = [explain(1, SEARCH) for _ in range(40)]
            while len(served.engine.orders) < 8:
                await asyncio.sleep(0)
            other = explain(2, ADS)
            while served.engine.orders[-1].prompt_token_ids != (2,):
                await asyncio.sleep(0)
            assert len(served.engine.orders) == 9, "one caller has eight of sixteen turns"
        finally:
            go_on.set()
        ends = await asyncio.gather(other, *many, return_exceptions=True)
        assert {end.code() for end in ends} == {grpc.StatusCode.FAILED_PRECONDITION}
        assert len(served.engine.orders) == 41
