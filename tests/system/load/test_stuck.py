"""A step that does not return: health notices while it lasts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse_server.config import ServerConfig

from tests.fixtures.patience import BOUND_S
from tests.system.load.live_server import is_finished, live_server, request

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_ALLOWED_S = 2.0 + 0.5
"""The promise, and what a busy machine may add to it."""


async def test_a_stuck_step_is_not_serving_within_two_seconds_and_serving_when_it_ends() -> None:
    async with live_server(stuck_timeout_s=ServerConfig().stuck_timeout_s) as server:
        stub: Any = health_pb2_grpc.HealthStub(server.channel)
        watch = stub.Watch(
            health_pb2.HealthCheckRequest(service="icehouse.v1.InferenceService"), timeout=BOUND_S
        )
        assert (await watch.read()).status == _SERVING
        server.runner.get_stuck()
        stream = server.inference.Stream(request("stuck"), timeout=BOUND_S)
        assert await asyncio.to_thread(server.runner.stuck.wait, BOUND_S)
        began = time.monotonic()
        assert (await watch.read()).status == _NOT_SERVING
        assert time.monotonic() - began <= _ALLOWED_S
        server.runner.come_free()
        assert (await watch.read()).status == _SERVING
        assert await is_finished(stream)
        watch.cancel()
