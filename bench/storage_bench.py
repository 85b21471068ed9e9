"""The SSD tier against the raw file system: spill, restore and start, as ratios; with a key, and compressed.

    python -m bench.storage_bench [--directory DIR] [--cases NAME ...] [--rounds N] [--blocks N]

Both sides of a ratio run in turn in one process on the same bytes and in the same directory,
so that other work of the machine hits both. Results are medians with quartiles.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from icehouse_server.clock import SystemClock
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import prepare_block
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.encryption.aes_gcm import Cipher
from icehouse_server.storage.storage_settings import Codec

from bench.storage_tier import FINGERPRINT, Shape, Tier, make_chain, settings, tier_read, tier_write

CASES = ("bandwidth", "encryption", "codec", "auto", "start")
LARGE = Shape(32, 8, 128)
CIPHER = Cipher(bytes(32))


def elapsed(action: Callable[[], object]) -> float:
    """Return the seconds an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def raw_write(directory: Path, chain: list[HostBlock]) -> None:
    """Only write and fsync each block's bytes as one file."""
    for index, block in enumerate(chain):
        descriptor = os.open(directory / f"raw{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        views = [tensor.data for region in block.regions for tensor in region.tensors]
        written = os.writev(descriptor, views)
        assert written == block.size_bytes
        os.fsync(descriptor)
        os.close(descriptor)


def raw_read(directory: Path, count: int, size_bytes: int) -> None:
    """Read each file into one fresh buffer."""
    whole = np.empty(count * size_bytes, dtype=np.uint8).data
    for index in range(count):
        descriptor = os.open(directory / f"raw{index}", os.O_RDONLY)
        got = os.readv(descriptor, [whole[index * size_bytes : (index + 1) * size_bytes]])
        assert got == size_bytes
        os.close(descriptor)


def report(name: str, ratios: list[float], *, target: float, detail: str) -> None:
    """Print one line: the median ratio, its quartiles, and the target."""
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"{name:<34} {median:5.2f} x  [{low:4.2f} .. {high:4.2f}]  target {target:4.2f}  {detail}")


def in_turns(number: int, ours: Callable[[], object], raw: Callable[[], object]) -> tuple[float, float]:
    """Time both sides, the other one first in every second round: the second often meets a busier disk."""
    if number % 2:
        raw_s = elapsed(raw)
        return elapsed(ours), raw_s
    ours_s = elapsed(ours)
    return ours_s, elapsed(raw)


def one_round(directory: Path, chain: list[HostBlock], number: int) -> tuple[float, float, float, float]:
    """Return the seconds of a spill, a raw write, a restore and a raw read of one chain.

    Reads are far faster than writes and are repeated; the fastest of each side counts, since
    the first ones touch memory that the system has yet to map.
    """
    size_bytes = chain[0].size_bytes
    with Tier(directory / "tier") as tier:
        written = in_turns(number, lambda: tier_write(tier, chain), lambda: raw_write(directory, chain))
        reads = [
            in_turns(
                turn, lambda: tier_read(tier, chain), lambda: raw_read(directory, len(chain), size_bytes)
            )
            for turn in range(6)
        ]
    return *written, min(ours for ours, _ in reads), min(raw for _, raw in reads)


def bench_bandwidth(root: Path, *, name: str, rounds: int, block_count: int, shape: Shape) -> None:
    """Print spill and restore bandwidth as a share of the raw file system's."""
    times = []
    # The first two rounds touch memory that the machine has not handed out yet; they do not count.
    for number in range(-2, rounds):
        chain = make_chain(block_count, shape=shape, seed=number + 2)
        directory = Path(tempfile.mkdtemp(dir=root))
        times.append(one_round(directory, chain, number))
        shutil.rmtree(directory)
    times = times[2:]
    size_bytes = chain[0].size_bytes
    for what, ours, raw, target in (
        ("spill / raw write+fsync", 0, 1, 0.8),
        ("restore / raw read", 2, 3, 0.75),
    ):
        raw_rate = statistics.median(block_count * size_bytes / row[raw] for row in times)
        report(
            f"{what}, {name}",
            [row[raw] / row[ours] for row in times],
            target=target,
            detail=f"{block_count} x {size_bytes / 1e6:.1f} MB, raw {raw_rate / 1e6:.0f} MB/s",
        )


def spill_and_restore(directory: Path, cipher: Cipher | None, seed: int) -> tuple[float, float]:
    """Return the seconds of a spill and of the quickest restore of one chain, encrypted or not."""
    chain = make_chain(4, shape=LARGE, seed=seed, cipher=cipher)
    with Tier(directory, cipher=cipher) as tier:
        spill_s = elapsed(lambda: tier_write(tier, chain))
        return spill_s, min(elapsed(lambda: tier_read(tier, chain)) for _ in range(6))


def bench_encryption(root: Path, *, rounds: int) -> None:
    """Print what encryption costs: spill and restore with a key as a share of the same in the clear."""
    spills, restores = [], []
    # The first two rounds touch memory that the machine has not handed out yet; they do not count.
    for number in range(-2, rounds):
        directory = Path(tempfile.mkdtemp(dir=root))
        times = {}
        for cipher in (None, CIPHER) if number % 2 else (CIPHER, None):
            times[cipher] = spill_and_restore(directory / ("key" if cipher else "clear"), cipher, number + 2)
        spills.append(times[None][0] / times[CIPHER][0])
        restores.append(times[None][1] / times[CIPHER][1])
        shutil.rmtree(directory)
    for name, ratios in (("spill", spills[2:]), ("restore", restores[2:])):
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{f'{name}, encrypted / in the clear':<34} {median:5.2f} x  [{low:4.2f} .. {high:4.2f}]")


def forget_files(directory: Path) -> None:
    """Have the system drop these files from its page cache, so that they are read from the disk.

    Does nothing on systems without such a call: reads then come from memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_codec(directory: Path, codec: Codec, seed: int) -> tuple[float, float, float, float]:
    """Return seconds of a spill, of a restore from the disk and of one from memory, and the files' bytes as a
    share of the tensors'."""
    chain = make_chain(4, shape=LARGE, seed=seed, has_values=True)
    with Tier(directory, codec=codec) as tier:
        spill_s = elapsed(lambda: tier_write(tier, chain))
        from_disk = []
        for _ in range(3):
            forget_files(directory)
            from_disk.append(elapsed(lambda: tier_read(tier, chain)))
        from_memory = [elapsed(lambda: tier_read(tier, chain)) for _ in range(6)]
    file_bytes = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
    share = file_bytes / sum(block.size_bytes for block in chain)
    return spill_s, min(from_disk), min(from_memory), share


def bench_codec(root: Path, *, rounds: int) -> None:
    """Print what byte planes save and cost: bytes and times as multiples of those of raw blocks."""
    rows = []
    # The first two rounds touch memory that the machine has not handed out yet; they do not count.
    for number in range(-2, rounds):
        directory = Path(tempfile.mkdtemp(dir=root))
        found = {}
        for codec in (Codec.RAW, Codec.PLANES) if number % 2 else (Codec.PLANES, Codec.RAW):
            found[codec] = time_codec(directory / codec, codec, number + 2)
        rows.append([ours / raw for ours, raw in zip(found[Codec.PLANES], found[Codec.RAW], strict=True)])
        shutil.rmtree(directory)
    for index, name, target in (
        (3, "files, planes / raw", "target 0.72"),
        (0, "spill, planes / raw", ""),
        (1, "restore from disk, planes / raw", "target 1.10 where the disk is the bound"),
        (2, "restore from memory, planes / raw", ""),
    ):
        low, median, high = statistics.quantiles([row[index] for row in rows[2:]], n=4)
        print(f"{name:<34} {median:5.2f} x  [{low:4.2f} .. {high:4.2f}]  {target}".rstrip())


class PacedFiles(Files):
    """The system's files, read at the pace of a slower disk, which serves all readers one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_time = 0.0

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        """Read, and return when a disk of that pace would."""
        began = time.perf_counter()
        got = super().read_into(descriptor, parts, offset=offset)
        with self._lock:
            self._free_time = max(self._free_time, began) + got / self._bytes_per_s
            left_s = self._free_time - time.perf_counter()
        time.sleep(max(0.0, left_s))
        return got


def time_choice(directory: Path, codec: Codec, files: Files, seed: int) -> tuple[float, float]:
    """Return the seconds of the quickest restore from the disk, and the files' bytes as a share of the
    tensors', of blocks that were written when others, in either form, had been read for a while."""
    known: set[Path] = set()
    with Tier(directory, codec=codec, files=files) as tier:
        for turn in range(3):
            known = {*directory.rglob("*.safetensors")}
            chain = make_chain(2, shape=LARGE, seed=seed + 1000 * turn, has_values=True)
            tier_write(tier, chain)
            restores = []
            for _ in range(4):
                forget_files(directory)
                restores.append(elapsed(partial(tier_read, tier, chain)))
    file_bytes = sum(path.stat().st_size for path in {*directory.rglob("*.safetensors")} - known)
    return min(restores), file_bytes / sum(block.size_bytes for block in chain)


def bench_auto(root: Path, *, rounds: int, paced_bytes_per_s: float) -> None:
    """Print what `auto` chooses, saves and costs against raw blocks, on this disk and on a slowed one."""
    for disk, rate in (
        ("this disk", 0.0),
        (f"reads paced at {paced_bytes_per_s / 1e6:.0f} MB/s", paced_bytes_per_s),
    ):
        rows = []
        for number in range(-1, rounds):
            directory = Path(tempfile.mkdtemp(dir=root))
            found = {}
            for codec in (Codec.RAW, Codec.AUTO) if number % 2 else (Codec.AUTO, Codec.RAW):
                files = PacedFiles(rate) if rate else Files()
                found[codec] = time_choice(directory / codec, codec, files, number + 2)
            rows.append((found[Codec.AUTO][0] / found[Codec.RAW][0], found[Codec.AUTO][1]))
            shutil.rmtree(directory)
        # The first round touches memory that the machine has not handed out yet; it does not count.
        for index, what in ((0, "restore, auto / raw"), (1, "files, auto / tensors")):
            low, median, high = statistics.quantiles([row[index] for row in rows[1:]], n=4)
            print(f"{what + ', ' + disk:<50} {median:5.2f} x  [{low:4.2f} .. {high:4.2f}]")


def bench_start(root: Path, *, file_count: int, rounds: int) -> None:
    """Print the seconds of a start over many small blocks: clean, full walk, and rebuilt."""
    directory = root / "start"
    fill(directory, file_count)
    for name, target, spoil in (
        ("start, clean", 0.5, lambda: None),
        ("start, full walk", 3.0, lambda: (directory / "clean.json").unlink()),
    ):
        times = []
        for _ in range(rounds):
            spoil()
            store = BlockStore(settings(directory), files=Files(), clock=SystemClock())
            store.lock()
            times.append(elapsed(store.open))
            assert len(store.index) == file_count and store.report.repair_count == 0
            assert store.report.clean == (name == "start, clean")
            assert store.close()
            store.unlock()
        low, median, high = statistics.quantiles(times, n=4)
        print(f"{name:<34} {median:5.2f} s  [{low:4.2f} .. {high:4.2f}]  target {target:4.2f}  {file_count}")
    (directory / "manifest.sqlite3").unlink()
    store = BlockStore(settings(directory), files=Files(), clock=SystemClock())
    store.lock()
    seconds = elapsed(store.open)
    assert store.report.adopted_count == file_count and store.report.manifest_rebuilt
    print(f"{'start, manifest rebuilt from files':<34} {seconds:5.2f} s  {file_count} blocks")
    store.close()


class HastyFiles(Files):
    """The system's files without syncs, only to fill a directory quickly."""

    def fsync(self, descriptor: int) -> None:
        """Do not wait."""

    def fsync_dir(self, path: str) -> None:
        """Do not wait."""


def fill(directory: Path, file_count: int) -> None:
    """Commit many small blocks."""
    store = BlockStore(settings(directory), files=HastyFiles(), clock=SystemClock())
    store.lock()
    store.open()
    store.admit(FINGERPRINT, {})
    for start in range(0, file_count, 1000):
        for block in make_chain(min(1000, file_count - start), shape=Shape(1, 1, 1), seed=start):
            store.finish(store.begin(prepare_block(block)))
    store.close()
    store.unlock()


def main() -> None:
    """Run everything in a directory that is removed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument(
        "--paced-mb", type=float, default=300.0, help="of the slow disk that `auto` has, MB/s"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds per ratio")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks for the start")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is 2 at least: one round has no quartiles")
    root = Path(tempfile.mkdtemp(prefix="icehouse-bench-", dir=options.directory))
    try:
        if "bandwidth" in options.cases:
            for name, count, shape in (("large", 4, LARGE), ("small", 16, Shape(18, 1, 256))):
                bench_bandwidth(root, name=name, rounds=options.rounds, block_count=count, shape=shape)
        if "encryption" in options.cases:
            bench_encryption(root, rounds=options.rounds)
        if "codec" in options.cases:
            bench_codec(root, rounds=options.rounds)
        if "auto" in options.cases:
            bench_auto(root, rounds=options.rounds, paced_bytes_per_s=1e6 * options.paced_mb)
        if "start" in options.cases:
            bench_start(root, file_count=options.blocks, rounds=max(3, options.rounds // 3))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
