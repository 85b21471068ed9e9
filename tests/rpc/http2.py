"""A bare HTTP/2 peer over a plain socket, for what no gRPC client would do. It checks nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import hpack
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
)

GENERATE_PATH = "/icehouse.v1.InferenceService/Generate"
ENHANCE_YOUR_CALM = 11

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTE_COUNT = 9

AnyFrame = TypeVar("AnyFrame", bound=Frame)


class Peer:
    """One connection. Sends frames and collects what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._next_stream = 1
        self.frames: list[Frame] = []
        self.headers: dict[int, dict[str, str]] = {}
        """All header fields of a stream so far, trailers included."""
        self.is_closed = False

    async def send_frame(self, *frames: Frame) -> None:
        """Send frames; a connection that the server has cut is noted, not raised."""
        self._writer.write(b"".join(frame.serialize() for frame in frames))
        try:
            await self._writer.drain()
        except ConnectionError:
            self.is_closed = True

    async def open_call(self, path: str = GENERATE_PATH) -> int:
        """Send a call's headers and return its stream; its message is yet to come."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        frame = HeadersFrame(stream, self._encoder.encode(list(fields.items())), flags=["END_HEADERS"])
        await self.send_frame(frame)
        return stream

    async def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes of a call's message."""
        await self.send_frame(DataFrame(stream, data, flags=["END_STREAM"] if end else []))

    async def reset(self, stream: int) -> None:
        """Take a call back."""
        await self.send_frame(RstStreamFrame(stream, error_code=8))

    async def ping(self, number: int = 0) -> None:
        """Send a ping."""
        await self.send_frame(PingFrame(0, number.to_bytes(8, "big")))

    def answered_ping_count(self) -> int:
        """How many pings came back."""
        return sum(isinstance(frame, PingFrame) and "ACK" in frame.flags for frame in self.frames)

    async def answered(self, ping_count: int) -> None:
        """Return when so many pings came back, or the server said good-bye."""
        await self.until(lambda: self.said_goodbye() or self.answered_ping_count() >= ping_count)

    async def until(self, is_there: Callable[[], bool], *, timeout_s: float = 20) -> None:
        """Read on until it is there; raises TimeoutError, or EOFError when the server hangs up before."""
        async with asyncio.timeout(timeout_s):
            while not is_there():
                await self._receive()

    async def first(self, kind: type[AnyFrame]) -> AnyFrame:
        """Return the first frame of a kind."""
        await self.until(lambda: any(isinstance(frame, kind) for frame in self.frames))
        return next(frame for frame in self.frames if isinstance(frame, kind))

    async def quiet(self, timeout_s: float) -> None:
        """Take what comes for so long."""
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: False, timeout_s=timeout_s)

    async def hung_up(self) -> None:
        """Return when the server has closed the connection."""
        with contextlib.suppress(EOFError):
            await self.until(lambda: self.is_closed)

    async def status(self, stream: int) -> tuple[int, str]:
        """Return a call's status code and message."""
        await self.until(lambda: "grpc-status" in self.headers.get(stream, {}))
        found = self.headers[stream]
        return int(found["grpc-status"]), found.get("grpc-message", "")

    def said_goodbye(self) -> bool:
        """Whether the server wants no more calls here."""
        return any(isinstance(frame, GoAwayFrame) for frame in self.frames)

    async def settings(self) -> dict[int, int]:
        """Return what the server said first."""
        return dict((await self.first(SettingsFrame)).settings)

    async def _receive(self) -> None:
        try:
            head = await self._reader.readexactly(_HEADER_BYTE_COUNT)
            frame, size_bytes = Frame.parse_frame_header(memoryview(head))
            frame.parse_body(memoryview(await self._reader.readexactly(size_bytes)))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.is_closed = True
            raise EOFError("the server closed the connection") from None
        self.frames.append(frame)
        if isinstance(frame, HeadersFrame):
            assert "END_HEADERS" in frame.flags, "no test makes headers of two frames"
            fields: list[tuple[Any, Any]] = list(self._decoder.decode(frame.data))
            self.headers.setdefault(frame.stream_id, {}).update(fields)
        if isinstance(frame, SettingsFrame | PingFrame) and "ACK" not in frame.flags:
            answer = PingFrame(0, frame.opaque_data) if isinstance(frame, PingFrame) else SettingsFrame(0)
            answer.flags.add("ACK")
            await self.send_frame(answer)


@contextlib.asynccontextmanager
async def peer_of(address: str) -> AsyncIterator[Peer]:
    """Connect to "host:port" and exchange settings."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    peer = Peer(reader, writer)
    try:
        writer.write(_PREFACE)
        await peer.send_frame(SettingsFrame(0))
        await peer.settings()
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def framed(message: bytes) -> bytes:
    """Return a message as gRPC writes it: not compressed, its length before it."""
    return b"\x00" + len(message).to_bytes(4, "big") + message
