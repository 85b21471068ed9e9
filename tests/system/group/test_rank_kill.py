"""kill -9 of a rank at random moments, of its start and under load: callers are told, and no token is wrong.

ICEHOUSE_KILL_ROUNDS is how often the long test kills, ICEHOUSE_KILL_SEED its dice; with -s it tells what came
of it. What was killed is started again, and what lives on is not, as under a service manager.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.crash.generate_load import EventTrigger, Reference, Seen, ask, run_until_gone
from tests.system.group.rank_group import RankGroup
from tests.system.group.signals import die_in_join, signal_at_record

pytestmark = pytest.mark.group

_ROUNDS = int(os.environ.get("ICEHOUSE_KILL_ROUNDS", "200"))
_SEED = int(os.environ.get("ICEHOUSE_KILL_SEED", "2"))
_OPTIONS = (
    *("--prefill-chunk-token-count", "16"),
    # Little RAM, so that blocks are spilled and loaded all the time, and little disk, so that they go.
    *("--ram-bytes", "128KiB", "--ssd-bytes", "6MiB", "--write-queue-bytes", "1MiB"),
    *("--spill-policy", "write_behind", "--min-prefix-token-count", "0", "--no-restore-or-recompute"),
)
_CALLER_COUNT = 4
_EVENT_COUNT = 60
"""A rank is killed when so many events have come to the callers on average: sometimes after the first one,
sometimes after many times as many."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    """Prompts that share beginnings, and what one process says to each without a cache."""
    stems = [prompt(64, salt=salt) for salt in range(3)]
    prompts = [[*stem, *prompt(8 + 16 * n, salt=10 * n + 5)] for stem in stems for n in range(4)]
    with CacheServer(model, None, is_enabled=False) as served:
        return [
            Reference(tuple(tokens), tuple(served.ask(str(i), tokens, max_output_tokens=12).tokens))
            for i, tokens in enumerate(prompts)
        ]


def at_start(moment: int) -> Callable[[], None]:
    """Return what kills a rank as it logs so many records, as it joins the ring with 0."""
    return functools.partial(signal_at_record, signal.SIGKILL, moment) if moment else die_in_join


def kill_ranks(model: Path, references: list[Reference], folder: Path, *, count: int, seed: int) -> None:
    """Kill so often; then let a group live, and end in order. Each group is killed at its start, comes back,
    and is killed under load."""
    dice = random.Random(seed)
    total, killed, told_s = Seen(), Counter[tuple[str, int]](), 0.0
    while killed.total() < count:
        rank, first = dice.randrange(2), dice.randrange(2)
        broken = {first: at_start(dice.randrange(11))}
        group = RankGroup(model, folder, options=_OPTIONS, break_rank=broken)
        with group:
            if group.start_again_until_serving():
                killed["start", first] += 1
            kill_times: list[float] = []

            def kill(group: RankGroup = group, rank: int = rank, times: list[float] = kill_times) -> None:
                times.append(time.monotonic())
                group.ranks[rank].kill()

            trigger = EventTrigger(event_count=1 + int(dice.expovariate(1 / _EVENT_COUNT)), action=kill)
            seen = run_until_gone(
                group.serving.address, references, rng=dice, trigger=trigger, callers=_CALLER_COUNT
            )
            told_s = max(told_s, time.monotonic() - kill_times[0]) if kill_times else told_s
            assert all(process.wait() != 0 for process in group.ranks)
        if rank and kill_times:
            assert set(seen.cut_codes) == {grpc.StatusCode.UNAVAILABLE}
        killed["load", rank if kill_times else first] += 1
        total.finished_count += seen.finished_count
        total.ssd_token_count += seen.ssd_token_count
        total.cut_codes += seen.cut_codes
        print(f"{dict(killed)}, told within {told_s:.2f} s, {total.finished_count} answers", flush=True)
    print(f"{killed.total()} kills, seed {seed}: {total}")
    # A few kills may all come before anything is written.
    assert count < 20 or total.ssd_token_count > 0, "no start was warm"
    last = Seen()
    for _ in range(2):
        with RankGroup(model, folder, options=_OPTIONS) as group:
            group.serving.wait_until_serving()
            for reference in references:
                assert ask(group.serving.address, reference, last, on_event=lambda: None)
            group.serving.terminate()
            assert [process.wait() for process in group.ranks] == [0, 0]
    assert last.ssd_token_count > 0, "what was written as it ended in order was not found again"


def test_killed_four_times(model: Path, references: list[Reference], tmp_path: Path) -> None:
    kill_ranks(model, references, tmp_path, count=4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(max(3000, 30 * _ROUNDS))
def test_killed_so_often(model: Path, references: list[Reference], tmp_path: Path) -> None:
    kill_ranks(model, references, tmp_path, count=_ROUNDS, seed=_SEED)
