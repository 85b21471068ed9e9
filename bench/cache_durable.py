"""Durability: how soon a turn is on SSD, and how long a stop takes with a gigabyte of fresh blocks.

Right after each stop, as many bytes are written and synced as plain files in the same directory: the stop is
compared with that. Not before the stop: the server would write blocks behind meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from icehouse.v1 import cache_stats_pb2

from bench.cache_ttft import connected
from bench.grpc_clients import READ_WRITE, Client, token_request
from bench.random_model import KV_BYTES_PER_TOKEN, RandomModel, make_random_model
from bench.report import Spread, Verdict, console, ratios, show_table, spread_of
from bench.server_process import ServerProcess

TURN_TOKEN_COUNT = 1024
TURN_COUNT = 8
"""Together a gigabyte of KV."""
ALL_WRITTEN_TARGET_S = 10.0
STOP_TARGET_RATIO = 1.5
"""3 s for what a disk of 0.5 GB/s writes in 2 s."""
_WHOLE_BYTES = TURN_COUNT * TURN_TOKEN_COUNT * KV_BYTES_PER_TOKEN
_FILE_BYTES = 32 << 20
_WAIT_LIMIT_S = 120.0
_FLAGS = ("--ram-bytes", "4GiB", "--flush-timeout-s", "80", "--no-restore-or-recompute")


@dataclasses.dataclass(frozen=True, slots=True)
class Durability:
    """Times of one round. Plain writes are of a gigabyte."""

    all_written_s: float
    """From the end of one turn until every complete block of it is on SSD."""
    unwritten_share: float
    """Share of the gigabyte not written yet when the stop began, right after the last turn."""
    behind_stop_s: float
    """Time of that stop."""
    behind_plain_s: float
    evict_stop_s: float
    """Time of a stop with nothing written before, as with `--spill-policy on_evict`."""
    evict_plain_s: float


async def measure_durable(*, scratch: Path, log_file: Path, round_count: int) -> list[Durability]:
    """Return one entry a round, each with directories of its own."""
    model_path = make_random_model(scratch, which=RandomModel.FLAT)
    found = []
    for number in range(round_count):
        dice = random.Random(number)
        directory = scratch / f"durable-{number}"
        server = ServerProcess(
            model=str(model_path), cache_directory=directory / "behind", log_file=log_file, flags=_FLAGS
        )
        with server:
            async with connected(server.address) as client:
                all_written_s = await _seconds_until_written(client, dice)
                written_bytes = (await _spill(client)).persisted_byte_total
                await _fill(client, dice)
                written_bytes = (await _spill(client)).persisted_byte_total - written_bytes
            behind_stop_s, behind_plain_s = _time_stop(server, directory)
        server = ServerProcess(
            model=str(model_path),
            cache_directory=directory / "evict",
            log_file=log_file,
            flags=(*_FLAGS, "--spill-policy", "on_evict"),
        )
        with server:
            async with connected(server.address) as client:
                await _fill(client, dice)
                assert not (await _spill(client)).persisted_byte_total, "it was not to be written yet"
            evict_stop_s, evict_plain_s = _time_stop(server, directory)
        share = 1.0 - min(1.0, written_bytes / _WHOLE_BYTES)
        found.append(
            Durability(all_written_s, share, behind_stop_s, behind_plain_s, evict_stop_s, evict_plain_s)
        )
        shutil.rmtree(directory)
        console.print(f"durability, round {number + 1} of {round_count}")
    return found


async def _seconds_until_written(client: Client, dice: random.Random) -> float:
    await _turn(client, dice)
    ended_s = time.perf_counter()
    while (spill := await _spill(client)).behind_waiting_count or spill.queue_count:
        assert time.perf_counter() < ended_s + _WAIT_LIMIT_S, spill
    return time.perf_counter() - ended_s


async def _fill(client: Client, dice: random.Random) -> None:
    for _ in range(TURN_COUNT):
        await _turn(client, dice)


async def _turn(client: Client, dice: random.Random) -> None:
    tokens = [dice.randrange(10, 210) for _ in range(TURN_TOKEN_COUNT)]
    await client.stream(token_request(tokens, max_output_tokens=1, cache=READ_WRITE))


async def _spill(client: Client) -> cache_stats_pb2.CacheSpillStats:
    return (await client.stats()).cache.spill


def _time_stop(server: ServerProcess, directory: Path) -> tuple[float, float]:
    """Return the seconds of the stop, and of a plain write of a gigabyte after it."""
    began_s = time.perf_counter()
    server.stop()
    return time.perf_counter() - began_s, _plain_write_s(directory, _WHOLE_BYTES)


def _plain_write_s(directory: Path, size_bytes: int) -> float:
    """Write and sync files as large as blocks. They stay until the end, as blocks do: writes into memory that
    a deleted file has freed are faster, above all on a virtual machine."""
    data = random.Random(0).randbytes(_FILE_BYTES)
    folder = directory / "plain"
    folder.mkdir()
    began_s = time.perf_counter()
    for number, start in enumerate(range(0, size_bytes, _FILE_BYTES)):
        with (folder / f"{number}").open("xb", buffering=0) as file:
            file.write(memoryview(data)[: size_bytes - start])
            os.fsync(file)
    spent_s = time.perf_counter() - began_s
    shutil.rmtree(folder)
    return spent_s


def durable_verdicts(found: Sequence[Durability]) -> list[Verdict]:
    """Print the seconds and return the targets."""
    written = spread_of(one.all_written_s for one in found)
    rows: list[tuple[str, Spread]] = [
        ("until a turn of 128 MiB is on SSD, s", written),
        ("share of 1 GiB not on SSD right behind the last turn", spread_of(o.unwritten_share for o in found)),
        ("that stop, s", spread_of(one.behind_stop_s for one in found)),
        ("plain write of 1 GiB behind it, s", spread_of(one.behind_plain_s for one in found)),
        ("stop with all of 1 GiB to write, s", spread_of(one.evict_stop_s for one in found)),
        ("plain write of 1 GiB behind it, s", spread_of(one.evict_plain_s for one in found)),
    ]
    show_table(
        "Until blocks outlive the process", ("what", "median (min to max)"), ((n, s.text()) for n, s in rows)
    )
    stops = ratios([o.evict_stop_s for o in found], [o.evict_plain_s for o in found])
    behind = ratios([o.behind_stop_s for o in found], [o.behind_plain_s for o in found])
    return [
        Verdict("turn on SSD, s", written, ALL_WRITTEN_TARGET_S, False),
        Verdict("stop behind 1 GiB / plain write of it", behind, STOP_TARGET_RATIO, False),
        Verdict("the same, nothing written behind", stops, STOP_TARGET_RATIO, False),
    ]
