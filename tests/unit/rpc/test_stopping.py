"""A stop tells every caller something it can go by: nobody's call is cancelled by the server."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse_server.rpc import rpc_server as server
from icehouse_server.rpc.auth_interceptor import loop_timeout

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refusal_of, refused
from tests.fixtures.rpc.fake_engine import hanging
from tests.fixtures.rpc.http2 import Peer, framed, peer_of
from tests.unit.rpc.conftest import RunningServer, running
from tests.unit.rpc.services.test_endings import REQUEST, read_to_error

UNAVAILABLE: int = grpc.StatusCode.UNAVAILABLE.value[0]
MESSAGE = framed(REQUEST.SerializeToString())
CALL_COUNT = 8


class Outsider:
    """A peer with an event loop of its own: what it does while the server's stands still has arrived."""

    def __init__(self, address: str, work: Callable[[Peer, Outsider], Coroutine[Any, Any, Any]]) -> None:
        self._address = address
        self._work = work
        self._said: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._result = self._pool.submit(lambda: asyncio.run(self._run()))

    async def _run(self) -> Any:
        async with peer_of(self._address, timeout_s=BOUND_S) as peer:
            return await self._work(peer, self)

    def say(self) -> None:
        """Let the server's loop go on."""
        self._said.set_result(None)

    def stall_the_loop(self) -> None:
        """Stop the calling event loop until the peer says."""
        self._said.result(BOUND_S)

    async def result(self) -> Any:
        """Return what its work returned."""
        try:
            return await asyncio.wrap_future(self._result)
        finally:
            self._pool.shutdown()


async def arrived(peer: Peer) -> None:
    """Return when the server's core has taken in all that was sent."""
    number = peer.answered_ping_count() + 1
    await peer.ping(number)
    await peer.answered(number)


async def statuses(peer: Peer, streams: list[int]) -> list[int]:
    """Return each call's status code."""
    return [(await peer.status(stream))[0] for stream in streams]


async def test_calls_that_wait_for_a_stalled_loop_are_refused_not_cancelled() -> None:
    async def call(peer: Peer, outsider: Outsider) -> list[int]:
        streams = []
        for _ in range(CALL_COUNT):
            streams.append(await peer.open_call())
            await peer.send(streams[-1], MESSAGE, end=True)
        await arrived(peer)
        outsider.say()
        return await statuses(peer, streams)

    async with running() as served:
        outsider = Outsider(served.server.address, call)
        outsider.stall_the_loop()
        await served.server.stop(grace_s=BOUND_S)
        assert await outsider.result() == [UNAVAILABLE] * CALL_COUNT


async def test_the_port_stays_open_for_who_has_not_heard_of_the_stop(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For ever, unless somebody calls.
    for name in ("_QUIET_TURNS", "_LONGEST_TURNS"):
        monkeypatch.setattr(server, name, 1_000_000)
    monkeypatch.setattr(server, "_BUSY_TURNS", 1)
    stopping = asyncio.create_task(served.server.stop(grace_s=BOUND_S))
    await served.settle()
    assert (await refused(served.inference.Generate(REQUEST))).reason == "DRAINING"
    async with asyncio.timeout(BOUND_S):
        await stopping


async def test_a_call_whose_message_is_yet_to_come_is_refused_at_once(served: RunningServer) -> None:
    async with peer_of(served.server.address) as peer:
        stream = await peer.open_call()
        await arrived(peer)
        while not served.server._calls.open_count:
            await asyncio.sleep(0)
        await served.server.stop(grace_s=BOUND_S)
        code, message = await peer.status(stream)
        assert code == UNAVAILABLE and "stopping" in message


async def test_what_runs_when_the_grace_is_over_ends_as_unavailable() -> None:
    async with running() as served:
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        await stream.read()
        await served.server.stop(grace_s=0)
        assert await served.cancelled() == "r"
        assert refusal_of(await read_to_error(stream)).reason == "DRAINING"


async def test_watchers_of_health_are_told_and_then_left() -> None:
    async with running() as served:
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        # gRPC's client drops what it has not handed over when the end comes, so the end waits for a call.
        served.engine.script = hanging
        stream = served.inference.Stream(REQUEST)
        await stream.read()
        stopping = asyncio.create_task(served.server.stop(grace_s=BOUND_S))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stream.cancel()
        await stopping
        assert (await read_to_error(watch)).code() is grpc.StatusCode.UNAVAILABLE


async def test_health_is_told_to_whoever_asks_while_calls_end(served: RunningServer) -> None:
    served.engine.script = hanging
    stream = served.inference.Stream(REQUEST)
    await stream.read()
    stopping = asyncio.create_task(served.server.stop(grace_s=BOUND_S))
    await served.settle()
    health: Any = health_pb2_grpc.HealthStub(served.channel)
    told = await health.Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    assert told.status == health_pb2.HealthCheckResponse.NOT_SERVING
    stream.cancel()
    await stopping


async def test_a_message_that_came_while_the_loop_stood_still_is_not_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_open = concurrent.futures.Future[None]()

    async def call(peer: Peer, outsider: Outsider) -> int:
        stream = await peer.open_call()
        await asyncio.wrap_future(is_open)
        await peer.send(stream, MESSAGE, end=True)
        await arrived(peer)
        outsider.say()
        return (await peer.status(stream))[0]

    async with running() as served:
        outsider = Outsider(served.server.address, call)
        while not served.server._calls.open_count:
            await asyncio.sleep(0)
        is_open.set_result(None)
        outsider.stall_the_loop()
        # The stall was longer than any timeout.
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 3600)
        assert await outsider.result() == grpc.StatusCode.OK.value[0]


async def test_what_does_not_come_is_late() -> None:
    with pytest.raises(TimeoutError):
        async with loop_timeout(0.01):
            await asyncio.Event().wait()
