"""Connection of a caller, with bounds that uvicorn does not have.

uvicorn bounds the size of a request's headers and how long a connection idles between two requests. Here are
the others: how long headers take, how long written bytes may lie unread, how much may be sent ahead of an
answer, and how many connections there are.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSED = "icehouse_http.refused"
"""Key of a request's scope: it was refused for what its caller does, who is to rest."""
_SEND_BUFFER_BYTES = 256 << 10
"""What the system holds of an answer that its caller does not read, where it would hold megabytes."""
_DROPPED_SHARE = 16
"""One in so many connections is closed at once when there are too many, so that few have to look for them."""


class BoundedConnection(H11Protocol):
    """uvicorn's protocol with these bounds. All connections of a server see each other."""

    header_timeout_s: ClassVar[float] = 30.0
    read_timeout_s: ClassVar[float] = 60.0
    """For the caller to read what it was sent, down to nothing that is left here."""
    pipeline_bytes: ClassVar[int] = 64 << 10
    """What may come behind a request that is not answered yet."""
    unread_bytes: ClassVar[int] = 32 << 20
    """What is thrown away of a body that was refused: who is still sending would not see the refusal."""
    connection_limit: ClassVar[int] = 1024
    rest_s: ClassVar[float] = 1.0
    """How long nothing is read behind a refusal; `retry-after` says as much."""

    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _thrown_away_bytes = 0
    _idle_since: float | None = None
    """None while a request is read or answered."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request, where there is a place for the connection."""
        has_room = self._make_room()
        super().connection_made(transport)
        if not has_room:
            transport.abort()
            return
        # Whatever the system does not take is seen by `pause_writing`. With 0, TLS would pause for nothing.
        transport.set_write_buffer_limits(high=1)
        if (opened := transport.get_extra_info("socket")) is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._idle_since = self.loop.time()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, or stop where the headers are complete."""
        super().data_received(data)
        self._thrown_away_bytes = 0 if self._is_busy else self._thrown_away_bytes + len(data)
        is_ahead = self._is_busy and len(self.conn.trailing_data[0]) > self.pipeline_bytes
        if is_ahead or self._thrown_away_bytes > self.unread_bytes:
            self.transport.abort()
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there already; behind a refusal after a rest."""
        is_refused = self.cycle is not None and REFUSED in self.cycle.scope
        super().on_response_complete()
        if self._is_busy:
            return
        self._idle_since = self.loop.time()
        if is_refused and not self.transport.is_closing():
            self.transport.pause_reading()
            self._rest_timer = self.loop.call_later(self.rest_s, self.transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._stop()
        self.resume_writing()
        if self._rest_timer is not None:
            self._rest_timer.cancel()

    def pause_writing(self) -> None:
        """Begin to wait for the caller to read."""
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The caller has read."""
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> bool:
        """Tell whether one more connection may be. Close those without a request that have waited longest.

        Those with a request stay: there are fewer of them, since requests are bounded too.
        """
        if len(self.connections) < self.connection_limit:
            return True
        idle = [c for c in self.connections if isinstance(c, BoundedConnection) and c._idle_since is not None]
        idle.sort(key=lambda connection: connection._idle_since or 0.0)
        for connection in idle[: max(1, len(self.connections) // _DROPPED_SHARE)]:
            connection.transport.abort()
            # Its end is told later, and many may come before that.
            self.connections.discard(connection)
        return bool(idle)

    def _watch(self) -> None:
        if self._is_busy:
            self._idle_since = None
            self._stop()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _stop(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
