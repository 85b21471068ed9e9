"""Stall timer of a reader: how long the connection may refuse to take a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from icehouse_server.errors import Overloaded, Reason


class StallTimer:
    """Ends a stream whose reader takes nothing, be it by time or because too much waits."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._scope: asyncio.Timeout | None = None

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

    def writing(self) -> None:
        """A message is being handed to the connection, which may wait for the reader."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    def written(self) -> None:
        """The connection took the message."""
        if self._scope is not None:
            self._scope.reschedule(None)

    def expire(self) -> None:
        """End the block now."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())
