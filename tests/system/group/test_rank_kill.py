"""kill -9 of a random rank at random moments, under load: callers are told, and no token is wrong.

ICEHOUSE_KILL_ROUNDS is how often the long test kills, ICEHOUSE_KILL_SEED its dice; with -s it tells what came
of it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import grpc
import pytest

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import CacheServer
from tests.system.cache.test_reuse import prompt
from tests.system.crash.generate_load import EventTrigger, Reference, Seen, ask, run_until_gone
from tests.system.group.rank_group import RankGroup

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
_EVENT_LIMIT = 250
"""A rank is killed when so many events have come to the callers at most."""


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


def kill_ranks(model: Path, references: list[Reference], folder: Path, *, count: int, seed: int) -> None:
    """Kill so often; then let a group live, and end in order."""
    dice = random.Random(seed)
    total, killed = Seen(), Counter[int]()
    group = RankGroup(model, folder, options=_OPTIONS)
    for _ in range(count):
        with group:
            group.serving.wait_until_serving()
            rank = dice.randrange(len(group.ranks))
            trigger = EventTrigger(event_count=dice.randint(1, _EVENT_LIMIT), action=group.ranks[rank].kill)
            seen = run_until_gone(
                group.serving.address, references, rng=dice, trigger=trigger, callers=_CALLER_COUNT
            )
            assert all(process.wait() != 0 for process in group.ranks)
        if rank:
            assert set(seen.cut_codes) == {grpc.StatusCode.UNAVAILABLE}
        killed[rank] += 1
        total.finished_count += seen.finished_count
        total.ssd_token_count += seen.ssd_token_count
        total.cut_codes += seen.cut_codes
    with group:
        group.serving.wait_until_serving()
        for reference in references:
            assert ask(group.serving.address, reference, total, on_event=lambda: None)
        group.serving.terminate()
        assert [process.wait() for process in group.ranks] == [0, 0]
    print(f"\n{count} kills, seed {seed}, by rank {dict(killed)}: {total}")
    assert total.finished_count > len(references) and total.ssd_token_count > 0


def test_killed_three_times(model: Path, references: list[Reference], tmp_path: Path) -> None:
    kill_ranks(model, references, tmp_path, count=3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(max(3000, 30 * _ROUNDS))
def test_killed_so_often(model: Path, references: list[Reference], tmp_path: Path) -> None:
    kill_ranks(model, references, tmp_path, count=_ROUNDS, seed=_SEED)
