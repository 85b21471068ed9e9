"""Health: grpc.health.v1 after the engine's state and heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from icehouse_server.clock import Clock
from icehouse_server.domain.model import EngineState
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router

REFRESH_INTERVAL_S = 0.5
"""How often the heartbeat is looked at. Changes of state do not wait for it."""


class Health:
    """Keeps the standard health service true. Owned by the event loop."""

    def __init__(
        self,
        *,
        engine: EnginePort,
        router: Router,
        clock: Clock,
        service_names: Sequence[str],
        heartbeat_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._router = router
        self._clock = clock
        self._names = ("", *service_names)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._changed = asyncio.Event()
        self.servicer = health.aio.HealthServicer()
        router.add_listener(self._changed.set)

    @property
    def is_serving(self) -> bool:
        """The model is warm, nobody ordered a stop, and the inference loop turns."""
        if self._router.state is not EngineState.READY:
            return False
        allowed_s = max(self._heartbeat_timeout_s, self._engine.step_allowance_s)
        return self._clock.monotonic() - self._engine.heartbeat_time <= allowed_s

    async def refresh(self) -> None:
        """Tell checkers and watchers how things stand."""
        serving = HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.servicer.set(name, serving)

    async def run(self) -> None:
        """Refresh on every change of state and at least once per interval, until cancelled."""
        while True:
            self._changed.clear()
            await self.refresh()
            # Without a change of state too: the heartbeat may have gone stale.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_INTERVAL_S):
                    await self._changed.wait()

    async def stop_serving(self) -> None:
        """NOT_SERVING from now on, whatever the engine says."""
        await self.servicer.enter_graceful_shutdown()
