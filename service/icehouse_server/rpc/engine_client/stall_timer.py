"""Stall timer of a reader: how long the connection may refuse to take a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from icehouse_server.errors import Overloaded, Reason
from icehouse_server.rpc.engine_client import answers
from icehouse_server.rpc.engine_client.disconnect import disconnect_as_cancel

_HEADERS_S = 1.0
"""How long an end waits for headers that are on their way; only a connection that takes nothing needs it."""


class Writable(Protocol):
    """What is wanted of a call's context."""

    async def send_initial_metadata(self, initial_metadata: Any) -> None: ...
    async def write(self, message: Any) -> None: ...


class StallTimer:
    """Ends a stream whose reader takes nothing, be it by time or because too much waits."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._scope: asyncio.Timeout | None = None
        self._has_begun = False

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Raise Overloaded READER_STALLED out of the block once the reader has stalled in it."""
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            raise Overloaded(
                Reason.READER_STALLED,
                f"the reader took nothing for {self._timeout_s:g} s or left too much unread; "
                "read the stream faster or ask for less",
                metadata={"stall_timeout_s": f"{self._timeout_s:g}"},
            ) from None
        finally:
            self._scope = None

    async def begin(self, context: Writable) -> None:
        """Send the headers, for a reader who waits for them while there is no message yet."""
        if not self._has_begun:
            self._has_begun = True
            sending = asyncio.ensure_future(context.send_initial_metadata(()))
            sending.add_done_callback(_note_failure)
            try:
                with disconnect_as_cancel():
                    await asyncio.shield(sending)
            except asyncio.CancelledError:
                # gRPC believes that headers which were broken off have not been sent, sends them again with
                # the status, is refused that by its core, and the caller would never hear of the end.
                await asyncio.wait((sending,), timeout=_HEADERS_S)
                raise

    async def write(self, context: Writable, message: answers.Message) -> None:
        """Hand a message to the connection, which may wait for the reader; only within `guard`.

        Raises as `answers.write` does.
        """
        # Apart from the message: headers that wait with it for the reader would keep the call from being
        # ended with a status (grpc 1.85).
        await self.begin(context)
        self._reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        await answers.write(context, message)
        self._reschedule(None)

    def _reschedule(self, when: float | None) -> None:
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(when)

    def expire(self) -> None:
        """End the block now."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())


def _note_failure(sending: asyncio.Future[None]) -> None:
    """Have asyncio not report headers that failed while nobody waited for them any more: the call has ended
    and the caller is gone. Whoever still waits hears of it as ever."""
    if not sending.cancelled():
        sending.exception()
