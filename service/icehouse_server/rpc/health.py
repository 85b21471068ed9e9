"""Health service: the standard one, from the engines' states and heartbeats, for the server and each model.

`models/<name>` asks about one model, by its name or an alias. Any other name is a service's or empty, and
asks whether the server accepts calls at all, whichever models are loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from icehouse_server.errors import IcehouseError, NotFound
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.calls.call_lifecycle import Context, end
from icehouse_server.rpc.calls.status import status_of
from icehouse_server.rpc.engine_client.answers import StallTimer
from icehouse_server.rpc.engine_client.seat import Seats

MODEL_PREFIX = "models/"
"""Prefix of model names."""
_LOOK_INTERVAL_S = 0.5
"""How often watchers look at the heartbeat. State changes are sent at once."""


class Health(health_pb2_grpc.HealthServicer):
    """Owned by the event loop.

    A check gets the status at that moment. Each watcher looks at it in its own task, without a lock:
    grpc_health's own servicer writes under a lock, so one reader that takes nothing stops everybody's
    updates.
    """

    def __init__(
        self,
        *,
        seats: Seats,
        service_names: Sequence[str],
        heartbeat_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._seats = seats
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._is_stopping = False
        self._changed = asyncio.Event()
        """Set at the next change of state; each change has its own event."""
        self._names = frozenset(("", *service_names))
        self._stall_timeout_s = stall_timeout_s
        seats.add_listener(self._wake_watchers)

    @property
    def is_serving(self) -> bool:
        """The server accepts calls, no stop was ordered, and the inference loop turns."""
        return not self._is_stopping and self._seats.turns(patience_s=self._heartbeat_timeout_s)

    def serves(self, model: str) -> bool:
        """Whether this task's caller may send calls for a model now; raises as `Seats.find`."""
        return self.is_serving and self._seats.takes(model, callers.current.get())

    def stop_serving(self) -> None:
        """Report NOT_SERVING from now on, whatever the engine says."""
        self._is_stopping = True
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        # Current waiters have the old event; later ones get the new one, which is not set.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:
        """Answer for all services, and for the models that the caller may use. grpc_health's stubs lack this
        method."""
        messages: Any = health_pb2
        models: list[str] = []
        with contextlib.suppress(IcehouseError):  # the only model is not there yet
            models = [MODEL_PREFIX + model.name for model in self._seats.listed(callers.current.get())]
        return messages.HealthListResponse(
            statuses={
                name: HealthCheckResponse(status=self._status(name)) for name in (*self._names, *models)
            }
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
                    # Look even without a change of state: the heartbeat may have become stale.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_INTERVAL_S):
                            await changed.wait()
        except IcehouseError as error:
            await end(context, status_of(error))

    def _status(self, name: str) -> Any:
        try:
            if name.startswith(MODEL_PREFIX):
                is_serving = self.serves(name.removeprefix(MODEL_PREFIX))
            elif name in self._names:
                is_serving = self.is_serving
            else:
                return HealthCheckResponse.SERVICE_UNKNOWN
        except NotFound:
            return HealthCheckResponse.SERVICE_UNKNOWN
        except IcehouseError:  # the only model is not loaded yet, or no longer
            is_serving = False
        return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
