"""Header timeout: ends a connection whose request does not have all its headers in time.

uvicorn bounds their size and how long a connection may idle between two requests, but not this.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class HeaderTimeoutProtocol(H11Protocol):
    """uvicorn's protocol with a bound on how long the headers of a request take."""

    header_timeout_s: ClassVar[float] = 30.0

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, or stop where the headers are complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _stop(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
