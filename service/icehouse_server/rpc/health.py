"""Health: grpc.health.v1 by the engine's state and heartbeat.

A check is answered by the state at that moment. Each watcher is written to by its own task, without a lock:
grpc_health's own servicer writes under one, so that one reader who takes nothing keeps everybody's status
from changing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from icehouse_server.clock import Clock
from icehouse_server.domain.model import EngineState
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.calls.call_lifecycle import Context, end
from icehouse_server.rpc.calls.status import status_of
from icehouse_server.rpc.engine_client.answers import StallTimer
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router

REFRESH_INTERVAL_S = 0.5
"""How often the heartbeat is checked. Changes of state do not wait for it."""


class Health(health_pb2_grpc.HealthServicer):
    """Knows whether the server serves, and answers the standard service. Owned by the event loop."""

    def __init__(
        self,
        *,
        engine: EnginePort,
        router: Router,
        clock: Clock,
        service_names: Sequence[str],
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._router = router
        self._clock = clock
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._is_stopping = False
        self._shown = self.is_serving
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        """Set at the next change of the status; later changes have an event of their own."""
        self._names = frozenset(("", *service_names))
        self._stall_timeout_s = stall_timeout_s
        router.add_listener(self._wake.set)

    @property
    def is_serving(self) -> bool:
        """The model is warm, nobody ordered a stop, and the inference loop turns."""
        if self._is_stopping or self._router.state is not EngineState.READY:
            return False
        allowed_s = max(self._heartbeat_timeout_s, self._engine.step_allowance_s)
        return self._clock.monotonic() - self._engine.heartbeat_time <= allowed_s

    def refresh(self) -> None:
        """Wake the watchers if the status has changed since they were last woken."""
        serving = self.is_serving
        if serving is not self._shown:
            self._shown = serving
            # Those who wait have the old event; others get the new one, which is not set.
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def run(self) -> None:
        """Refresh on every change of state and at least once per interval, until cancelled."""
        while True:
            self._wake.clear()
            self.refresh()
            # Also without a change of state: the heartbeat may have gone stale.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_INTERVAL_S):
                    await self._wake.wait()

    def stop_serving(self) -> None:
        """NOT_SERVING from now on, whatever the engine says."""
        self._is_stopping = True
        self.refresh()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: Any, context: Context) -> Any:
        """Answer for all services. grpc_health's stubs lack this method."""
        messages: Any = health_pb2
        return messages.HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in self._names}
        )

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        """Send the status now and at each change, until the caller ends the call."""
        timer = StallTimer(timeout_s=self._stall_timeout_s)
        sent: object = None
        try:
            async with timer.guard():
                while True:
                    # Taken before the status is read, so that no change in between is missed.
                    changed = self._changed
                    status = self._status(request.service)
                    if status != sent:
                        await timer.write(context, HealthCheckResponse(status=status))
                        sent = status
                    await changed.wait()
        except IcehouseError as error:
            await end(context, status_of(error))

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING
