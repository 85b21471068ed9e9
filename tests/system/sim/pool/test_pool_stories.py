"""Stories of a server of several models under one budget: eighty steps each, five hundred in the long ones.

A short one takes some 0.2 s of one core, a long one 1.5 s.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.system.sim.coverage import Coverage
from tests.system.sim.pool.pool_story import LONG_SEED, POOL_SEED, PoolStory
from tests.system.sim.stories import play

_STORY_COUNT = 16
_SLOW_CHUNK_COUNT = 10
_SLOW_CHUNK_SEED_COUNT = 10
_ONE_IN = {
    "large answered": 1,
    "window answered": 2,
    "state answered": 2,
    "twin answered": 2,
    "owned answered": 3,
    "liar answered": 2,
    "ram tokens": 2,
    "ssd tokens": 4,
    "left while it waited": 1,
    "left while it was answered": 1,
    "left with all its blocks on SSD": 2,
    "failed with its engine": 4,
    "unloaded": 1,
    "refused MODEL_NOT_LOADED": 1,
    "refused MODEL_NOT_FOUND": 4,
    "refused MEMORY_NEVER_FITS": 2,
    "refused MEMORY_SHORT": 40,
    "crash": 3,
    "kill": 3,
    "restart": 1,
}
"""Of so many stories one comes to it, counted over 300."""


@pytest.mark.skipif("ICEHOUSE_SIM_SEED" in os.environ, reason="one story was asked for")
def test_stories_of_several_models() -> None:
    coverage = Coverage(_ONE_IN)
    coverage.add(_played(POOL_SEED, _STORY_COUNT), story_count=_STORY_COUNT)
    coverage.check()


@pytest.mark.skipif("ICEHOUSE_SIM_SEED" in os.environ, reason="one story was asked for")
def test_such_a_story_is_told_the_same_way_twice() -> None:
    assert _played(POOL_SEED, 1) == _played(POOL_SEED, 1)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(_SLOW_CHUNK_COUNT))
def test_long_stories_of_several_models(chunk: int) -> None:
    coverage = Coverage(_ONE_IN)
    first = LONG_SEED + chunk * _SLOW_CHUNK_SEED_COUNT
    # Each is as long as six of the others.
    coverage.add(_played(first, _SLOW_CHUNK_SEED_COUNT), story_count=6 * _SLOW_CHUNK_SEED_COUNT)
    coverage.check()


def _played(first: int, count: int) -> Counter[str]:
    return play(range(first, first + count), make=PoolStory)
