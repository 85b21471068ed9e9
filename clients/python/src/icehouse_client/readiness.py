"""Wait for a server that takes requests: it is asked again and again until it says so, or until the deadline.

What came last is told when time is up, since "nobody listens there" and "it loads" need different deeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
from icehouse.v1.server_service_pb2 import (
    SERVER_STATE_FAILED,
    SERVER_STATE_READY,
    Server,
    ServerState,
)

from icehouse_client.errors import IcehouseClientError, translated

_FIRST_DELAY_S = 0.1
_LAST_DELAY_S = 1.0


class ReadinessWait:
    """One wait; `timeout_s` counts from its making, None is for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end_time = None if timeout_s is None else time.monotonic() + timeout_s
        self._delay_s = _FIRST_DELAY_S
        self._last = "it has not answered"

    def run(self, ask: Callable[[float | None], Server]) -> Server:
        """Return what `ask` returns of a server that is ready; it is called with the seconds that are left.

        Raises DEADLINE_EXCEEDED when time is up, and at once whatever waiting cannot help.
        """
        while True:
            try:
                with translated():
                    server = ask(self._left_s())
            except IcehouseClientError as error:
                self._note_refusal(error)
            else:
                if self._is_ready(server):
                    return server
            time.sleep(self._next_delay_s())

    async def run_async(self, ask: Callable[[float | None], Awaitable[Server]]) -> Server:
        """As `run`, with an awaitable question."""
        while True:
            try:
                with translated():
                    server = await ask(self._left_s())
            except IcehouseClientError as error:
                self._note_refusal(error)
            else:
                if self._is_ready(server):
                    return server
            await asyncio.sleep(self._next_delay_s())

    def _note_refusal(self, error: IcehouseClientError) -> None:
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise self._late() from None
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            raise error
        self._last = str(error)

    def _is_ready(self, server: Server) -> bool:
        if server.state == SERVER_STATE_FAILED:
            message = "the server's engine has failed; start it again"
            raise _error(grpc.StatusCode.INTERNAL, message, reason="ENGINE_FAILED")
        self._last = f"it is {ServerState.Name(server.state).removeprefix('SERVER_STATE_')}"
        return server.state == SERVER_STATE_READY

    def _left_s(self) -> float | None:
        return None if self._end_time is None else max(0.0, self._end_time - time.monotonic())

    def _next_delay_s(self) -> float:
        left_s, delay_s = self._left_s(), self._delay_s
        self._delay_s = min(2 * delay_s, _LAST_DELAY_S)
        if left_s is None:
            return delay_s
        if left_s == 0:
            raise self._late()
        return min(delay_s, left_s)

    def _late(self) -> IcehouseClientError:
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        return _error(code, f"the server was not ready in time: {self._last}", reason=code.name)


def _error(code: grpc.StatusCode, message: str, *, reason: str) -> IcehouseClientError:
    return IcehouseClientError(code, message, reason=reason, metadata={}, field=None, retry_after_s=None)
