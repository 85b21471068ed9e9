"""Stories of two servers that share an object store which is slow, forgets, fails and lies."""

from __future__ import annotations

import os

import pytest

from tests.system.sim.scenario import SHARED_SEED
from tests.system.sim.stories import play

_STORY_COUNT = 26


@pytest.mark.skipif("ICEHOUSE_SIM_SEED" in os.environ, reason="one story was asked for")
def test_a_fickle_store_breaks_no_promise() -> None:
    seen = play(range(SHARED_SEED, SHARED_SEED + _STORY_COUNT))
    assert seen["ChainFound"] and seen["Fetched"] and seen["answered by a neighbour"]
