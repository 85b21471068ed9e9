"""`make soak`: many streams for an hour; the server's memory and open files must not grow.

The same loop, shorter, is a slow test (tests/system/load/test_soak.py). Callers stream prompts that share
beginnings, leave in the middle now and then, and come back at once. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from icehouse.v1 import inference_service_pb2 as messages

from bench.grpc_clients import READ_WRITE, Client, token_request
from bench.report import OUT, console, setting, show_table, write_json
from bench.server_process import ServerProcess
from tests.fixtures.models.folder import tiny_model_dir

CONNECTION_COUNT = 16
SERVER_FLAGS = (
    ("--decode-batch-limit", "256"),
    ("--block-token-count", "16"),
    ("--min-prefix-token-count", "0"),
    ("--ram-bytes", str(16 << 20)),
    ("--ssd-bytes", str(64 << 20)),
    ("--write-queue-bytes", str(4 << 20)),
    ("--free-space-floor-bytes", "0"),
)
"""Every stream in the batch; both tiers so small that they are full, and evict, from the start on. So is the
queue between them, whose 256 MiB fill and empty as the disk is slower or faster for a while."""

_SAMPLE_COUNT = 120
_LEAVES_EARLY = 0.1
_SHARED_PREFIXES = 32
_SHARED_TOKEN_LIMIT, _OWN_TOKEN_LIMIT, _OUTPUT_TOKEN_LIMIT = 128, 24, 96
_PEAK_COUNT = 3
_RSS_GROWTH_LIMIT = 1.03
_DESCRIPTOR_GROWTH_LIMIT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of the server process at one moment of the run."""

    elapsed_s: float
    rss_bytes: int
    descriptor_count: int
    finished_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trend:
    """The last quarter of a run over the third one; the first half warms up.

    Of memory it is the least that a part saw: requests come in waves, with which the heap grows by a quarter
    for a while, and chance says which part has more of them. A leak raises the floor. A run begins with its
    highest peak, since on a busy machine new ones came for ten minutes otherwise.
    """

    rss_ratio: float
    descriptor_growth: int
    finished_count: int

    @property
    def is_flat(self) -> bool:
        """Neither memory nor open files grew by more than noise."""
        flat_rss = self.rss_ratio <= _RSS_GROWTH_LIMIT
        return flat_rss and self.descriptor_growth <= _DESCRIPTOR_GROWTH_LIMIT


def trend_of(samples: Sequence[Sample]) -> Trend:
    """Compare the minima of memory and the maxima of open files; needs at least eight samples."""
    assert len(samples) >= 8, f"{len(samples)} samples are too few"
    quarter = len(samples) // 4
    early, late = samples[-2 * quarter : -quarter], samples[-quarter:]
    rss = [min(s.rss_bytes for s in part) for part in (early, late)]
    descriptors = [max(s.descriptor_count for s in part) for part in (early, late)]
    return Trend(rss[1] / rss[0], descriptors[1] - descriptors[0], samples[-1].finished_count)


async def soak(
    address: str,
    process_id: int,
    *,
    stream_count: int,
    duration_s: float,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Keep `stream_count` streams open at `address` and return samples of the process behind it."""
    clients = [Client(address) for _ in range(CONNECTION_COUNT)]
    counts = [0] * stream_count
    began = time.monotonic()

    async def call_on(index: int) -> None:
        source = random.Random(index)
        while time.monotonic() - began < duration_s:
            await _call(clients[index % CONNECTION_COUNT], source)
            counts[index] += 1

    async def watch() -> list[Sample]:
        samples = []
        while (elapsed_s := time.monotonic() - began) < duration_s:
            samples.append(sample_of(process_id, elapsed_s, sum(counts)))
            on_sample(samples[-1])
            await asyncio.sleep(duration_s / _SAMPLE_COUNT)
        return samples

    try:
        for _ in range(_PEAK_COUNT):
            await asyncio.gather(
                *(_peak(clients[i % CONNECTION_COUNT], random.Random(i)) for i in range(stream_count))
            )
        began = time.monotonic()
        found = await asyncio.gather(watch(), *(call_on(i) for i in range(stream_count)))
    finally:
        for client in clients:
            await client.close()
    return list(found[0])


async def _peak(client: Client, source: random.Random) -> None:
    """Read the longest reply to the longest prompt, which begins like no other."""
    tokens = [source.randrange(10, 250) for _ in range(_SHARED_TOKEN_LIMIT + _OWN_TOKEN_LIMIT)]
    request = token_request(tokens, max_output_tokens=_OUTPUT_TOKEN_LIMIT, cache=READ_WRITE)
    async for _ in client.inference.Stream(request):
        pass


async def _call(client: Client, source: random.Random) -> None:
    """Stream one reply to its end, or cancel it in the middle."""
    shared = random.Random(source.randrange(_SHARED_PREFIXES))
    tokens = [shared.randrange(10, 250) for _ in range(16 * shared.randrange(1, _SHARED_TOKEN_LIMIT // 16))]
    tokens += [source.randrange(10, 250) for _ in range(source.randrange(1, _OWN_TOKEN_LIMIT))]
    wanted = source.randrange(8, _OUTPUT_TOKEN_LIMIT)
    request = token_request(tokens, max_output_tokens=wanted, cache=READ_WRITE)
    leave_after = source.randrange(1, wanted) if source.random() < _LEAVES_EARLY else wanted + 1
    call = client.inference.Stream(request)
    finished = messages.Finished()
    token_count = 0
    async for response in call:
        token_count += len(response.delta.token_ids)
        if response.WhichOneof("event") == "finished":
            finished = response.finished
        if token_count >= leave_after:
            call.cancel()
            return
    assert finished.usage.output_tokens > 0, "a stream ended without its finish"


def sample_of(process_id: int, elapsed_s: float, finished_count: int) -> Sample:
    """Return a process's memory and open files now."""
    process = Path(f"/proc/{process_id}")
    lines = (process / "status").read_text(encoding="ascii").splitlines()
    rss_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return Sample(elapsed_s, rss_kib * 1024, len(list((process / "fd").iterdir())), finished_count)


def main() -> None:
    """Soak a server, print the result, write bench/out/soak.json; exit 1 if something grew."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument(
        "--hangs", action="store_true", help="the cache disk hangs for some seconds now and then"
    )
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-soak-")))
        model = tiny_model_dir(scratch, "llama")
        server = stack.enter_context(
            ServerProcess(
                model=str(model),
                cache_directory=scratch / "blocks",
                log_file=OUT / "soak.log",
                flags=[word for flag in SERVER_FLAGS for word in flag],
                module="bench.hanging_disk" if arguments.hangs else "icehouse_server.cli.main",
            )
        )
        samples = asyncio.run(
            soak(
                server.address,
                server.process_id,
                stream_count=arguments.streams,
                duration_s=arguments.seconds,
            )
        )
    trend = trend_of(samples)
    shown = samples[:: max(1, len(samples) // 12)]
    show_table(
        f"{arguments.streams} streams for {arguments.seconds:.0f} s",
        ("at, s", "RSS, MiB", "open files", "calls ended"),
        (
            (
                f"{s.elapsed_s:.0f}",
                f"{s.rss_bytes / 2**20:.1f}",
                f"{s.descriptor_count}",
                f"{s.finished_count}",
            )
            for s in shown
        ),
    )
    console.print(
        f"last quarter over third: RSS x {trend.rss_ratio:.3f}, open files {trend.descriptor_growth:+d}"
    )
    write_json("soak", {"setting": setting(), "samples": samples, "trend": trend})
    raise SystemExit(0 if trend.is_flat else 1)


if __name__ == "__main__":
    main()
