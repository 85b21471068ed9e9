"""Hundreds of seeded stories, thousands in `make test-slow`, a hundred times SIM_CHUNKS.

ICEHOUSE_SIM_SEED=n plays one of them and prints what happened in it.
"""

from __future__ import annotations

import os

import pytest

from tests.system.sim.scenario import IMAGES_SEED, NAMES_SEED, PIECES_SEED
from tests.system.sim.stories import play

_CHUNK_COUNT = 18
_CHUNK_SEED_COUNT = 30
_SLOW_CHUNK_COUNT = int(os.environ.get("SIM_CHUNKS", "50"))
_SLOW_CHUNK_SEED_COUNT = 100
_PIECES_SEED_COUNT = 20
_IMAGES_SEED_COUNT = 25
_NAMES_SEED_COUNT = 20
_ONE = os.environ.get("ICEHOUSE_SIM_SEED")

_REACHED = (
    "ram tokens",
    "ssd tokens",
    "evicted from RAM",
    "evicted from SSD",
    "crash",
    "kill",
    "restart",
    "clean open",
    "adopted",
    "lost rows",
    "shared tokens",
    "Cancelled",
    "DeadlineExceeded",
    "Overloaded",
    "parked",
    "STOP_STRING",
    "limit LOAD_FAILED",
    "limit RECOMPUTE_FASTER",
    "limit NO_CHECKPOINT",
    "drop DISK_FULL",
    "drop DAILY_BUDGET",
    "drop WRITE_FAILED",
    "failure header",
    "failure missing",
    "failure truncated",
    "PinReport",
    "EvictReport",
    "VerifyReport",
    "Explanation",
    "StorageFailed",
)
"""What a few hundred stories must come to, or they prove little."""


@pytest.mark.skipif(_ONE is None, reason="ICEHOUSE_SIM_SEED names no story to play alone")
def test_one_story() -> None:
    assert play([int(_ONE or 0)], is_told=True)["Inventory"] >= 0


@pytest.mark.skipif(_ONE is not None, reason="one story was asked for")
@pytest.mark.parametrize("chunk", range(_CHUNK_COUNT))
def test_stories(chunk: int) -> None:
    seen = play(range(chunk * _CHUNK_SEED_COUNT, (chunk + 1) * _CHUNK_SEED_COUNT))
    assert seen["ram tokens"] > 0 and seen["ssd tokens"] > 0 and seen["crash"] > 0


def test_stories_in_which_removals_come_in_pieces() -> None:
    seen = play(range(PIECES_SEED, PIECES_SEED + _PIECES_SEED_COUNT))
    assert seen["EvictReport"] > 0 and seen["KnownBlocks"] > 0 and seen["crash"] > 0


def test_stories_whose_prompts_have_images() -> None:
    seen = play(range(IMAGES_SEED, IMAGES_SEED + _IMAGES_SEED_COUNT))
    assert min(seen["reused image tokens"], seen["ssd tokens"], seen["parked"], seen["crash"]) > 0
    assert seen["blocks with images told"] > 0


def test_stories_in_which_names_are_left_unsynced() -> None:
    seen = play(range(NAMES_SEED, NAMES_SEED + _NAMES_SEED_COUNT))
    assert min(seen["adopted"], seen["kill"], seen["crash"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(_SLOW_CHUNK_COUNT))
def test_more_stories(chunk: int) -> None:
    first = 1_000_000 + chunk * _SLOW_CHUNK_SEED_COUNT
    seen = play(range(first, first + _SLOW_CHUNK_SEED_COUNT))
    unreached = [what for what in _REACHED if not seen[what]]
    assert len(unreached) <= 6, f"a hundred stories never reached {unreached}"


@pytest.mark.skipif(_ONE is not None, reason="one story was asked for")
def test_a_story_is_told_the_same_way_twice() -> None:
    assert play([7, 8]) == play([7, 8])
