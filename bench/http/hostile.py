"""Attacks on the HTTP front by one caller with a token, or with none that is known.

Each goes on until it is cancelled and checks nothing; `make bench CASE=httpattacks` measures what another
caller notices of it. Connections that end are opened again, so many a second, and what is sent is a line's
worth: a real caller is not on the server's own processor.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import math
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from icehouse_http.bounds.pace import Pace

MIB = 1 << 20
CONNECTION_COUNT = 1024
_HELD_COUNT = 600
"""Connections that do next to nothing: more than are wanted at once."""
_BUSY_COUNT = 16
_PAUSE_S = 0.01
_TRICKLE_S = 1.0
_CHAT = "/v1/chat/completions"
_TURN = {"role": "user", "content": "Hi"}
_STREAM = {"model": "any", "stream": True, "max_tokens": 2000, "messages": [_TURN]}
_BODY_BYTES = 31 * MIB

_SOURCE = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Where it calls from: another machine, as far as the front can tell."""
_BYTES_PER_S = 125e6
"""A line of a gigabit."""

Exchange = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class HostileCaller:
    """One caller that means ill. Its public methods are the attacks."""

    def __init__(self, host: str, port: int, token: str, *, connections_per_s: float = math.inf) -> None:
        self._host = host
        self._port = port
        self._token = token
        is_bounded = connections_per_s < math.inf
        self._connects = Pace(per_s=connections_per_s, at_once=1, longest_s=math.inf) if is_bounded else None
        self._line = Pace(per_s=_BYTES_PER_S, at_once=MIB, longest_s=math.inf) if is_bounded else None
        self.ended = collections.Counter[str]()
        """What came back, by status; "none" is a connection that ended without an answer."""

    async def nothing(self) -> None:
        """Nobody attacks: what a run shows beyond that is an attack's."""
        await asyncio.Event().wait()

    async def slow_headers(self) -> None:
        """Requests whose headers come a byte at a time."""
        beginning = f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Slow: ".encode()
        await self._many(_HELD_COUNT, self._trickle(beginning))

    async def silent_connections(self) -> None:
        """Connections on which nothing is sent, more than the front takes."""
        await self._many(2 * CONNECTION_COUNT, self._wait_for_end)

    async def slow_bodies(self) -> None:
        """Requests of 16 MiB that come a byte at a time."""
        await self._many(_HELD_COUNT, self._trickle(self._head(16 * MIB) + b'{"a": "'))

    async def slow_bodies_of_strangers(self) -> None:
        """The same with another unknown token on each connection."""

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = self._head(16 * MIB, token=secrets.token_hex(16))
            await self._trickle(head + b'{"a": "')(reader, writer)

        await self._many(_HELD_COUNT, exchange)

    async def strangers(self) -> None:
        """Requests with tokens that nobody has, as fast as they are refused."""
        body = json.dumps({**_STREAM, "stream": False}).encode()

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await self._ask(reader, writer, self._head(len(body), token=secrets.token_hex(16)) + body)

        await self._many(_HELD_COUNT, exchange)

    async def health_floods(self) -> None:
        """Health checks without a token, as fast as they are answered, on more connections than calls."""
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await self._ask(reader, writer, request)
                await asyncio.sleep(_TRICKLE_S)

        await self._many(_HELD_COUNT, exchange)

    async def long_texts(self) -> None:
        """Requests of 31 MiB that are one text."""
        await self._asking([b'{"messages": "' + b"a" * _BODY_BYTES + b'"}'])

    async def many_values(self) -> None:
        """Requests of 31 MiB that are lists of next to nothing."""
        await self._asking([b'{"a": [' + b"[],1," * (_BODY_BYTES // 5) + b"1]}"])

    async def many_keys(self) -> None:
        """Requests of 31 MiB that are one object of millions of keys."""
        keys = b",".join(b'"%d":1' % index for index in range(_BODY_BYTES // 11))
        await self._asking([b"{" + keys + b"}"])

    async def long_numbers(self) -> None:
        """Requests of 31 MiB that are numbers of 4,000 digits."""
        await self._asking([b'{"a": [' + (b"9" * 4000 + b",") * (_BODY_BYTES // 4001) + b"1]}"])

    async def deep_bodies(self) -> None:
        """Requests of 31 MiB that are nested, and do not end."""
        await self._asking([b'{"a":' * (_BODY_BYTES // 5), b"[" * _BODY_BYTES])

    async def many_turns(self) -> None:
        """Conversations of as many turns as a request holds."""
        turn = json.dumps({"role": "user", "content": "a"}).encode()
        count = _BODY_BYTES // (len(turn) + 1)
        fewer = [b'{"messages": [' + b",".join([turn] * n) + b"]}" for n in (count, 8000, 2000)]
        await self._asking(fewer)

    async def not_utf8(self) -> None:
        """Requests of a megabyte that is no text in any encoding."""
        await self._asking([b'{"messages": "' + b"\xff\xfe\x80" * (MIB // 3) + b'"}'])

    async def endless_bodies(self) -> None:
        """Bodies that go on behind their refusal, as fast as they are taken."""

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(self._head(1 << 40))
            while not reader.at_eof():
                await _wait(self._line, MIB)
                writer.write(b" " * MIB)
                await writer.drain()

        await self._many(_BUSY_COUNT, exchange)

    async def header_floods(self) -> None:
        """Headers without an end, as many short ones or as one."""

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode())
            for index in range(100_000):
                writer.write(b"".join(b"X-%d: 1\r\n" % (index + i) for i in range(1000)))
                await writer.drain()

        await self._many(4 * _BUSY_COUNT, exchange)

    async def unread_streams(self) -> None:
        """A thousand streams of 2,000 tokens that nobody reads."""
        body = json.dumps(_STREAM).encode()

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            transport: Any = writer.transport
            transport.pause_reading()
            writer.write(self._head(len(body)) + body)
            await asyncio.sleep(20.0)

        await self._many(CONNECTION_COUNT, exchange, receive_bytes=1024)

    async def read_streams(self) -> None:
        """A thousand streams, read, and begun again as each has ended."""
        body = json.dumps({**_STREAM, "max_tokens": 50}).encode()

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(self._head(len(body), close=True) + body)
            self.ended[await _status(reader)] += 1
            while await reader.read(1 << 16):
                pass

        await self._many(CONNECTION_COUNT, exchange)

    async def dropped_connections(self) -> None:
        """Connections that are opened and dropped at once, some of them in a request."""
        parts = itertools.cycle((b"", b"POST ", self._head(100), self._head(100) + b"{"))

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(next(parts))

        await self._many(_BUSY_COUNT, exchange)

    async def dropped_streams(self) -> None:
        """Streams whose caller is gone as soon as they are asked for."""
        body = json.dumps(_STREAM).encode()

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(self._head(len(body)) + body)
            await writer.drain()

        await self._many(_BUSY_COUNT, exchange)

    async def pipelined_requests(self) -> None:
        """Thousands of requests at once on each connection, whose answers nobody reads."""
        body = json.dumps({**_STREAM, "stream": False, "max_tokens": 1}).encode()
        request = self._head(len(body)) + body

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while not reader.at_eof():
                writer.write(request * 1000)
                await writer.drain()

        await self._many(_BUSY_COUNT, exchange)

    async def smuggled_requests(self) -> None:
        """Requests with two lengths, and behind them what one of the two says is another request."""
        inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        lines = f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._token}\r\n"
        both = f"{lines}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode() + inner
        twice = f"{lines}Content-Length: 5\r\nContent-Length: 6\r\n\r\n0\r\n\r\n".encode() + inner
        kinds = itertools.cycle((both, twice))

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._ask(reader, writer, next(kinds))

        await self._many(_BUSY_COUNT, exchange)

    def _head(self, size_bytes: int, *, token: str = "", close: bool = False) -> bytes:
        lines = [f"POST {_CHAT} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token or self._token}"]
        lines += [f"Content-Length: {size_bytes}", *(("Connection: close",) if close else ())]
        return "\r\n".join((*lines, "", "")).encode()

    def _trickle(self, beginning: bytes) -> Exchange:
        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answering = asyncio.ensure_future(_status(reader))
            writer.write(beginning)
            while not answering.done():
                await asyncio.wait({answering}, timeout=_TRICKLE_S)
                writer.write(b"a")
            self.ended[answering.result()] += 1

        return exchange

    async def _wait_for_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended[await _status(reader)] += 1

    async def _asking(self, bodies: list[bytes]) -> None:
        """Send the bodies in turn on each of a few connections, and again as each is answered."""
        turns = itertools.cycle(bodies)

        async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            body = next(turns)
            answering = asyncio.ensure_future(_status(reader))
            with contextlib.suppress(ConnectionError):
                writer.write(self._head(len(body), close=True))
                for begin in range(0, len(body), MIB):
                    await _wait(self._line, MIB)
                    if answering.done():
                        break
                    writer.write(body[begin : begin + MIB])
                    await writer.drain()
            self.ended[await answering] += 1

        await self._many(_BUSY_COUNT, exchange)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> None:
        writer.write(sent)
        status = await _status(reader)
        self.ended[status] += 1
        if status == "none":
            raise ConnectionError

    async def _many(self, count: int, exchange: Exchange, *, receive_bytes: int | None = None) -> None:
        """Have so many connections, each opened again when its exchange ends."""

        async def one() -> None:
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    async with self._connected(receive_bytes) as (reader, writer):
                        await exchange(reader, writer)
                await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as together:
            for _ in range(count):
                together.create_task(one())

    @contextlib.asynccontextmanager
    async def _connected(
        self, receive_bytes: int | None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        await _wait(self._connects, 1)
        with _socket(receive_bytes) as raw:
            raw.bind((_SOURCE, 0))
            await asyncio.get_running_loop().sock_connect(raw, (self._host, self._port))
            reader, writer = await asyncio.open_connection(sock=raw)
            try:
                yield reader, writer
            finally:
                writer.transport.abort()


async def _wait(pace: Pace | None, count: float) -> None:
    if pace is not None:
        await asyncio.sleep(pace.delay_s("", asyncio.get_running_loop().time(), count=count))


@contextlib.contextmanager
def _socket(receive_bytes: int | None) -> Iterator[socket.socket]:
    raw = socket.socket()
    raw.setblocking(False)
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    try:
        yield raw
    except BaseException:
        raw.close()
        raise


async def _status(reader: asyncio.StreamReader) -> str:
    """Read an answer's head and what comes with it; return its status, "none" where there was none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n") if b": " in line)
        await reader.readexactly(int(fields.get(b"content-length", b"0")))
    except (OSError, asyncio.IncompleteReadError):
        return "none"
    return head.split(b" ", 2)[1].decode()


ATTACKS = tuple(
    name for name, value in vars(HostileCaller).items() if callable(value) and not name.startswith("_")
)
