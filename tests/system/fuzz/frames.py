"""Frames of messages as no gRPC client would write them, over a bare HTTP/2 connection.

A frame that says it is compressed where no encoding was told, or is not what the encoding makes, is left
out: gRPC itself answers INTERNAL, as its specification wants (compression.md), before ours hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hyperframe.frame import GoAwayFrame, RstStreamFrame

from tests.fixtures.rpc.http2 import Peer, framed, peer_of

LONG_S = 600.0
"""An answer that has not come by then does not come."""

FAULTS: Mapping[str, Callable[[bytes], bytes]] = {
    "none": framed,
    "no message": lambda data: b"",
    "half a head": lambda data: framed(data)[:3],
    "cut off": lambda data: framed(data)[:-1],
    "two messages": lambda data: framed(data) * 2,
    "one and a half": lambda data: framed(data) + framed(data)[:6],
    "length too short": lambda data: b"\0" + (len(data) // 2).to_bytes(4, "big") + data,
    "length too long": lambda data: b"\0" + (len(data) + 1).to_bytes(4, "big") + data,
    "length of a gigabyte": lambda data: b"\0" + (1 << 30).to_bytes(4, "big") + data,
    "greatest length": lambda data: b"\0\xff\xff\xff\xff" + data,
    "unknown flags": lambda data: b"\x7e" + len(data).to_bytes(4, "big") + data,
    "zeros": lambda data: bytes(100),
}
"""What is wrong with a message's frame, and how it is made."""

_PIECE_BYTES = 16_000
"""A data frame; more than 16 KiB no peer need take."""

_BYTE_LIMIT = 60_000
"""What may be sent before the server has widened the window; the rest of a long message is cut off."""


async def send_frame(
    address: str, path: str, message: bytes, *, fault: str, token: str
) -> tuple[int | None, str]:
    """Send a message in a frame with this fault; return status and words, None when the call was reset."""
    data = FAULTS[fault](message)[:_BYTE_LIMIT]
    async with peer_of(address, timeout_s=LONG_S) as peer:
        stream = await peer.open_call(path, token=token)
        for start in range(0, len(data), _PIECE_BYTES):
            await peer.send(stream, data[start : start + _PIECE_BYTES])
        await peer.send(stream, b"", end=True)
        await peer.until(lambda: _is_over(peer, stream), timeout_s=LONG_S)
        found = peer.headers.get(stream, {})
        if "grpc-status" not in found:
            return None, ""
        return int(found["grpc-status"]), found.get("grpc-message", "")


def _is_over(peer: Peer, stream: int) -> bool:
    over = "grpc-status" in peer.headers.get(stream, {})
    return over or any(isinstance(frame, RstStreamFrame | GoAwayFrame) for frame in peer.frames)
