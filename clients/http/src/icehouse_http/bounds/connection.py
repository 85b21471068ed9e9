"""Connection of a caller, with bounds that uvicorn does not have.

uvicorn bounds the size of a request's headers and how long a connection idles between two requests. Here are
the others: how long headers take, how long written bytes may lie unread, how much may be sent ahead of an
answer, how many connections there are, and how often one machine opens them.

An answer that comes before its request's body has ended is the connection's last: what still comes is thrown
away unread, slowly, since a connection closed at once would take the answer along.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from icehouse_http.bounds.pace import Pace
from icehouse_http.errors import ApiError, dialect_of

KEPT_BACK_S = "icehouse_http.kept_back_s"
"""Key of a request's scope: how long its refusal is kept back, for one who has had many."""
_SEND_BUFFER_BYTES = 256 << 10
"""What the system holds of an answer that its caller does not read, where it would hold megabytes."""
_DROPPED_SHARE = 16
"""One in so many connections is closed at once when there are too many, so that few have to look for them."""
_LONGEST_TURN_S = 1.0
_CLOSE = (b"connection", b"close")


class BoundedConnection(H11Protocol):
    """uvicorn's protocol with these bounds. All connections of a server see each other."""

    header_timeout_s: ClassVar[float] = 30.0
    """For a request's headers, and for the rest of a body that nobody reads."""
    read_timeout_s: ClassVar[float] = 60.0
    """For the caller to read what it was sent, down to nothing that is left here."""
    pipeline_bytes: ClassVar[int] = 64 << 10
    """What may come behind a request that is not answered yet."""
    unread_bytes: ClassVar[int] = 32 << 20
    """What is thrown away of a body behind its answer: who is still sending would not see the answer."""
    connection_limit: ClassVar[int] = 1024
    arrivals: ClassVar[Pace] = Pace(per_s=100.0, at_once=512.0, longest_s=_LONGEST_TURN_S)
    """New connections of each other machine. One that would wait longest is closed instead."""
    discarding: ClassVar[Pace] = Pace(per_s=float(64 << 20), at_once=float(8 << 20), longest_s=1.0)
    """Bytes that are thrown away, of all connections together."""

    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _pause_timer: asyncio.TimerHandle | None = None
    _thrown_away_bytes = 0
    _is_ending = False
    """The last answer was written, before its request had ended."""
    _idle_since: float | None = None
    """None while a request is read or answered."""
    _begin = b""
    """Of the first request, to know whose API was meant where it cannot be read."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request, where there is a place for the connection."""
        has_room = self._make_room()
        super().connection_made(transport)
        turn_s = self._turn_s()
        if not has_room or turn_s >= _LONGEST_TURN_S:
            transport.abort()
            return
        self.app = functools.partial(self._answer, self.app)
        # Whatever the system does not take is seen by `pause_writing`. With 0, TLS would pause for nothing.
        transport.set_write_buffer_limits(high=1)
        if (opened := transport.get_extra_info("socket")) is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            if opened.family != socket.AF_UNIX:
                # A caller confirms late, and a second part of an answer would wait 40 ms for that.
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._idle_since = self.loop.time()
        self._pause_reading(turn_s)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, or stop where the headers are complete."""
        if self._is_ending:
            self._throw_away(len(data))
            return
        self._begin = self._begin or data[:64]
        super().data_received(data)
        if self._is_busy and len(self.conn.trailing_data[0]) > self.pipeline_bytes:
            self.transport.abort()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the form of the API that it seems to be meant for."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # An answer has begun.
            self.transport.abort()
            return
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        path = self._begin.partition(b" ")[2].decode("latin-1")
        if self._is_busy:
            path = self.cycle.scope["path"]
            # Whoever reads the body learns that no more of it comes.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(ApiError(status, msg, code="invalid_http").body(dialect_of(path))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), _CLOSE]
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._end()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there already."""
        super().on_response_complete()
        if not self._is_busy:
            self._idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._stop()
        self.resume_writing()
        if self._pause_timer is not None:
            self._pause_timer.cancel()

    def shutdown(self) -> None:
        """End as soon as the request is answered: at once, where only its refusal is kept back."""
        super().shutdown()
        if self._is_busy and self._idle_since is not None:
            self.cycle.message_event.set()

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
        return self.cycle is not None and not self.cycle.response_complete and not self._is_ending

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; keep a refusal back for as long as the app says, reading nothing meanwhile."""

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                if delay_s := scope.get(KEPT_BACK_S, 0.0):
                    await self._keep_back(delay_s)
                if self.conn.their_state is h11.SEND_BODY:
                    message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
                    self.cycle.transport = _EndingTransport(self.transport, self._end)
            await send(message)

        await app(scope, receive, send_in_time)

    async def _keep_back(self, delay_s: float) -> None:
        """Wait, or until the connection is lost. It is as good as idle, and may be closed for another one."""
        self._idle_since = self.loop.time()
        self.flow.pause_reading()
        self.cycle.message_event.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self.cycle.message_event.wait()
        self._idle_since = None

    def _end(self) -> None:
        """Close the connection as soon as its caller does, who may still be sending."""
        self._is_ending = True
        self._idle_since = self.loop.time()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._watch()

    def _throw_away(self, size_bytes: int) -> None:
        self._thrown_away_bytes += size_bytes
        if self._thrown_away_bytes > self.unread_bytes:
            self.transport.abort()
            return
        self._pause_reading(self.discarding.delay_s("", self.loop.time(), count=size_bytes))

    def _pause_reading(self, delay_s: float) -> None:
        if delay_s > 0:
            self.transport.pause_reading()
            self._pause_timer = self.loop.call_later(delay_s, self.transport.resume_reading)

    def _turn_s(self) -> float:
        """Return how long this new connection has to wait. Those of this machine do not: all callers behind
        a proxy here would wait for each other."""
        if self.client is None or self.server is None or self.client[0] == self.server[0]:
            return 0.0
        return self.arrivals.delay_s(self.client[0], self.loop.time())

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


class _EndingTransport(asyncio.Transport):
    """The transport as the last answer of a connection sees it: closing it ends the connection gently."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._end = end

    def close(self) -> None:
        self._end()

    def write(self, data: Any) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()
