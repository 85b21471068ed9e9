"""Hundreds of seeded stories, thousands in `make test-slow`, a hundred times SIM_CHUNKS.

A story takes some 0.1 s of one core. Each break of `test_teeth.py` is noticed within the first 300 stories,
most within ten, and all but two within the first 100 of their kind. So 120 are played here, and some of each
other kind, which test the same and more. Thousands of stories look for faults that nobody has thought of.

ICEHOUSE_SIM_SEED=n plays one of them and prints what happened in it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.system.sim.coverage import ONE_IN, Coverage
from tests.system.sim.pool.pool_story import POOL_SEED, PoolStory
from tests.system.sim.scenario import (
    ARCHIVES_SEED,
    IMAGES_SEED,
    NAMES_SEED,
    PIECES_SEED,
    PLANES_SEED,
    Scenario,
)
from tests.system.sim.stories import play

_CHUNK_COUNT = 4
_CHUNK_SEED_COUNT = 30
_SLOW_CHUNK_COUNT = int(os.environ.get("SIM_CHUNKS", "50"))
_SLOW_CHUNK_SEED_COUNT = 100
_PIECES_SEED_COUNT = 35
_IMAGES_SEED_COUNT = 40
_NAMES_SEED_COUNT = 40
_PLANES_SEED_COUNT = 30
_ARCHIVES_SEED_COUNT = 50
_ONE = os.environ.get("ICEHOUSE_SIM_SEED")


@pytest.fixture(scope="module")
def coverage() -> Iterator[Coverage]:
    """Coverage of all stories that this process plays, of whatever kind."""
    coverage = Coverage(ONE_IN)
    yield coverage
    coverage.check()


@pytest.mark.skipif(_ONE is None, reason="ICEHOUSE_SIM_SEED names no story to play alone")
def test_one_story() -> None:
    seed = int(_ONE or 0)
    make = PoolStory if seed >= POOL_SEED else Scenario
    assert play([seed], is_told=True, make=make)["Inventory"] >= 0


@pytest.mark.skipif(_ONE is not None, reason="one story was asked for")
@pytest.mark.parametrize("chunk", range(_CHUNK_COUNT))
def test_stories(chunk: int, coverage: Coverage) -> None:
    seen = coverage.play(chunk * _CHUNK_SEED_COUNT, _CHUNK_SEED_COUNT)
    assert seen["restart"] > 0


# `coverage.py` demands the events of each kind once fourteen times as many stories have run as one takes.


def test_stories_in_which_removals_come_in_pieces(coverage: Coverage) -> None:
    seen = coverage.play(PIECES_SEED, _PIECES_SEED_COUNT)
    assert seen["KnownBlocks"] > 0, "one story in 3.5 comes to it"


def test_stories_whose_prompts_have_images(coverage: Coverage) -> None:
    seen = coverage.play(IMAGES_SEED, _IMAGES_SEED_COUNT)
    assert seen["reused image tokens"] > 0, "one story in 4 comes to it"
    assert seen["blocks with images told"] > 0, "one story in 2 comes to it"


def test_stories_in_which_names_are_left_unsynced(coverage: Coverage) -> None:
    seen = coverage.play(NAMES_SEED, _NAMES_SEED_COUNT)
    assert seen["adopted"] > 0, "one story in 4 comes to it"


def test_stories_whose_blocks_are_in_byte_planes(coverage: Coverage) -> None:
    seen = coverage.play(PLANES_SEED, _PLANES_SEED_COUNT)
    assert seen["blocks in planes"] > 0, "nearly every story comes to it"
    assert seen["ssd tokens"] > 0, "one story in 3 comes to it"


def test_stories_in_which_archives_come_and_go(coverage: Coverage) -> None:
    seen = coverage.play(ARCHIVES_SEED, _ARCHIVES_SEED_COUNT)
    assert seen["exported blocks"] > 0, "one story in 3 comes to it"
    assert seen["adopted blocks"] > 0, "one story in 5 comes to it"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(_SLOW_CHUNK_COUNT))
def test_more_stories(chunk: int, coverage: Coverage) -> None:
    seen = coverage.play(1_000_000 + chunk * _SLOW_CHUNK_SEED_COUNT, _SLOW_CHUNK_SEED_COUNT)
    assert seen["restart"] > 0


@pytest.mark.skipif(_ONE is not None, reason="one story was asked for")
def test_a_story_is_told_the_same_way_twice() -> None:
    assert play([7, 8]) == play([7, 8])


def test_what_no_story_came_to_is_asked_of_enough_of_them_alone() -> None:
    coverage = Coverage({"parked": 2, "never": 2})
    coverage.add(Counter(parked=1), story_count=27)
    coverage.check()
    coverage.add(Counter(), story_count=1)
    with pytest.raises(AssertionError, match=r"28 stories never came to \['never'\]"):
        coverage.check()
