"""Inter-token times of a sequence that decodes beside the cache's work, by kind of neighbour.

One caller decodes with the cache off while a neighbour sends prompts: none at all (idle), prompts that
are computed and thrown away, prompts that are computed, kept and spilled, prompts that are restored from
SSD and not decoded (`Warm`), and prompts that decode one token after they came from RAM or from SSD.
Prefill takes turns with decode, and a second row costs each step it decodes in, whatever the cache does:
so spilling is compared with the same prefills uncached, and an SSD hit that decodes with a RAM hit. And
decode is bound by memory bandwidth, which reading takes a share of, whoever reads: so restoring is also
compared with another process that reads as many bytes of the same files in the same time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from icehouse.v1 import cache_service_pb2
from icehouse.v1 import inference_service_pb2 as messages

from bench.cache_ttft import connected
from bench.grpc_clients import NO_CACHE, READ_WRITE, Client, text_request, token_request
from bench.prompts import text_of_tokens
from bench.replies import quantile
from bench.report import console
from bench.server_process import ServerProcess

DECODED_TOKEN_COUNT = 256
NEIGHBOUR_TOKEN_COUNT = 512
NEW_PROMPT_COUNT = 6
"""More than are prefilled during one reply."""
STORED_PROMPT_COUNT = 3


class _RawRead:
    """Reads block files over and over into one buffer, at the rate at which restores have read them."""

    _PIECE_BYTES = 32 << 20

    def __init__(self, directory: Path, *, size_bytes: int, elapsed_s: float) -> None:
        files = [file for file in (directory / "blocks").rglob("*") if file.is_file()]
        self._files = sorted(files, key=lambda file: file.stat().st_mtime)[-6:]
        self._piece_s = elapsed_s * self._PIECE_BYTES / max(1, size_bytes)
        self._buffer = bytearray(self._PIECE_BYTES)
        self._count = 0
        assert self._files, f"no block files in {directory}"

    async def read_some(self) -> None:
        """Read a piece and wait for the rest of its time."""
        began = time.perf_counter()
        await asyncio.to_thread(self._read)
        await asyncio.sleep(max(0.0, self._piece_s - (time.perf_counter() - began)))

    def _read(self) -> None:
        self._count += 1
        descriptor = os.open(self._files[self._count % len(self._files)], os.O_RDONLY)
        try:
            os.preadv(descriptor, [self._buffer], 0)
        finally:
            os.close(descriptor)


_Request = messages.GenerateRequest | cache_service_pb2.WarmRequest | _RawRead


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Inter-token times of one decoding sequence beside one kind of neighbour, in seconds."""

    neighbour: str
    p50_s: float
    p99_s: float
    neighbour_ssd_tokens: int
    neighbour_request_count: int
    gaps_s: Sequence[float]


async def measure_decode(
    *, model_path: Path, scratch: Path, log_file: Path, round_count: int, kv_bytes_per_token: int
) -> list[DecodeTimes]:
    """Return one entry per round and kind of neighbour.

    The RAM tier holds one and a half of the neighbour's prompts, so that each new one spills an old one.
    """
    ram_bytes = NEIGHBOUR_TOKEN_COUNT * kv_bytes_per_token * 3 // 2
    flags = ("--ram-bytes", str(ram_bytes), "--no-restore-or-recompute")
    server = ServerProcess(
        model=str(model_path), cache_directory=scratch / "decode", log_file=log_file, flags=flags
    )
    found: list[DecodeTimes] = []
    with server:
        async with connected(server.address) as reader, connected(server.address) as neighbour:
            stored = [await _text(neighbour, seed=seed) for seed in range(STORED_PROMPT_COUNT)]
            for text in stored:
                await neighbour.stream(text_request(text, max_output_tokens=1, cache=READ_WRITE))
            # A server's first decode warms it up.
            await _beside(reader, neighbour, "idle", ())
            for round_index in range(round_count):
                new = [
                    await _text(neighbour, seed=100 * (round_index + 1) + i) for i in range(NEW_PROMPT_COUNT)
                ]
                if round_index % 2 == 0:
                    found += await _beside_prefill(reader, neighbour, new)
                found += await _beside_restore(
                    reader,
                    neighbour,
                    stored,
                    files=scratch / "decode",
                    kv_bytes_per_token=kv_bytes_per_token,
                )
                # A late part meets a machine in another state than an early one, so the order alternates.
                if round_index % 2:
                    found += await _beside_prefill(reader, neighbour, new)
                console.print(f"decode beside neighbours, round {round_index + 1} of {round_count}")
    return found


async def _text(client: Client, *, seed: int) -> str:
    return await text_of_tokens(client, NEIGHBOUR_TOKEN_COUNT, seed=seed)


async def _beside_prefill(reader: Client, neighbour: Client, texts: Sequence[str]) -> list[DecodeTimes]:
    """Decode alone, beside prompts that are not cached, and beside the same ones cached.

    RAM is full, so that every captured block spills another one.
    """
    uncached = [text_request(text, max_output_tokens=1, cache=NO_CACHE) for text in texts]
    cached = [text_request(text, max_output_tokens=1, cache=READ_WRITE) for text in texts]
    return [
        await _beside(reader, neighbour, "idle", ()),
        await _beside(reader, neighbour, "prefill", uncached),
        await _beside(reader, neighbour, "prefill and spill", cached),
    ]


async def _beside_restore(
    reader: Client, neighbour: Client, texts: Sequence[str], *, files: Path, kv_bytes_per_token: int
) -> list[DecodeTimes]:
    """Decode beside prompts from SSD, beside another reader of the same files, and beside a hit in RAM.

    The prompts together are too long for RAM: one after another, each comes from SSD every time.
    """
    cached = [text_request(text, max_output_tokens=1, cache=READ_WRITE) for text in texts]
    began = time.perf_counter()
    restoring = await _beside(reader, neighbour, "restore", [_warm(text) for text in texts], repeat=True)
    elapsed_s = time.perf_counter() - began
    raw = _RawRead(files, size_bytes=restoring.neighbour_ssd_tokens * kv_bytes_per_token, elapsed_s=elapsed_s)
    found = [
        restoring,
        await _beside(reader, neighbour, "raw read", [raw], repeat=True),
        await _beside(reader, neighbour, "SSD hit", cached, repeat=True),
    ]
    # A longer reply promotes its blocks to RAM, where a single repeated prompt then stays.
    await neighbour.stream(text_request(texts[0], max_output_tokens=32, cache=READ_WRITE))
    return [*found, await _beside(reader, neighbour, "RAM hit", cached[:1], repeat=True)]


async def _beside(
    reader: Client,
    neighbour: Client,
    name: str,
    requests: Sequence[_Request],
    *,
    repeat: bool = False,
) -> DecodeTimes:
    """Decode beside the neighbour's requests, sent one after another, over and over with `repeat`."""
    done = asyncio.Event()
    reading = asyncio.create_task(_read(reader, done))
    ssd_tokens = 0
    sent = 0
    while requests and not done.is_set():
        ssd_tokens += await _send(neighbour, requests[sent % len(requests)])
        sent += 1
        if sent == len(requests) and not repeat:
            break
    gaps = await reading
    return DecodeTimes(name, quantile(gaps, 0.5), quantile(gaps, 0.99), ssd_tokens, sent, gaps)


async def _send(neighbour: Client, request: _Request) -> int:
    """Send one prompt and return how many of its tokens came from SSD."""
    if isinstance(request, _RawRead):
        await request.read_some()
        return 0
    if isinstance(request, cache_service_pb2.WarmRequest):
        *_, last = [response async for response in neighbour.cache.Warm(request)]
        return int(last.done.cache.ssd_tokens)
    _, started, _ = await neighbour.stream(request)
    return int(started.cache.ssd_tokens)


def _warm(text: str) -> cache_service_pb2.WarmRequest:
    return cache_service_pb2.WarmRequest(prompt={"text": text}, cache=READ_WRITE)


async def _read(reader: Client, done: asyncio.Event) -> list[float]:
    request = token_request(list(range(40, 72)), max_output_tokens=DECODED_TOKEN_COUNT, cache=NO_CACHE)
    reply, _, _ = await reader.stream(request)
    done.set()
    times = reply.token_times_s
    return [b - a for a, b in itertools.pairwise(times)]
