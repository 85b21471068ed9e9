"""Health tells the truth whoever does not listen, and a server stops whoever watches it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hyperframe.frame import SettingsFrame
from icehouse_server.domain.model import EngineState

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.http2 import framed, peer_of
from tests.unit.rpc.conftest import RunningServer, running

WATCH_PATH = "/grpc.health.v1.Health/Watch"
WATCH = framed(health_pb2.HealthCheckRequest().SerializeToString())
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(served: RunningServer) -> Any:
    return health_pb2_grpc.HealthStub(served.channel)


async def status_of(served: RunningServer) -> int:
    answer = await health(served).Check(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    return int(answer.status)


async def test_a_watcher_that_takes_nothing_hides_no_change_from_others(served: RunningServer) -> None:
    watch = health(served).Watch(health_pb2.HealthCheckRequest(), timeout=BOUND_S)
    assert (await watch.read()).status == SERVING
    async with peer_of(served.server.address, window_bytes=0) as peer:
        await peer.send(await peer.open_call(WATCH_PATH), WATCH, end=True)
        await peer.ping(1)
        await peer.answered(1)
        assert await status_of(served) == SERVING
        served.router.state_changed(EngineState.FAILED, None)
        assert (await watch.read()).status == NOT_SERVING
        assert await status_of(served) == NOT_SERVING
    watch.cancel()


async def test_a_watcher_that_takes_nothing_does_not_keep_the_server_from_stopping() -> None:
    async with (
        running() as served,
        peer_of(served.server.address, window_bytes=0) as peer,
    ):
        await peer.send(await peer.open_call(WATCH_PATH), WATCH, end=True)
        await peer.ping(1)
        await peer.answered(1)
        assert await status_of(served) == SERVING
        async with asyncio.timeout(BOUND_S):
            await served.server.stop(grace_s=0)


async def test_a_watcher_that_takes_nothing_is_told_so_when_it_reads_again() -> None:
    async with (
        running(stall_timeout_s=0.05) as served,
        peer_of(served.server.address, window_bytes=0) as peer,
    ):
        stream = await peer.open_call(WATCH_PATH)
        await peer.send(stream, WATCH, end=True)
        await peer.quiet(1.0)
        await peer.send_frame(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 1 << 16}))
        code, message = await peer.status(stream)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "took nothing for 0.05 s" in message


async def test_a_change_is_told_once_to_each_watcher(served: RunningServer) -> None:
    watches = [health(served).Watch(health_pb2.HealthCheckRequest(), timeout=BOUND_S) for _ in range(3)]
    for status in (SERVING, NOT_SERVING, SERVING):
        for watch in watches:
            assert (await watch.read()).status == status
        state = EngineState.DRAINING if status == SERVING else EngineState.READY
        served.router.state_changed(state, None)
    for watch in watches:
        watch.cancel()


async def test_a_service_that_is_not_there_is_watched_as_unknown(served: RunningServer) -> None:
    watch = health(served).Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=BOUND_S)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_all_services_are_listed_with_their_status(served: RunningServer) -> None:
    messages: Any = health_pb2
    listed = await health(served).List(messages.HealthListRequest(), timeout=BOUND_S)
    assert {each.status for each in listed.statuses.values()} == {SERVING}
    assert {"", "icehouse.v1.InferenceService"} <= set(listed.statuses)
