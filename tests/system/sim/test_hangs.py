"""Stories whose disk hangs: reads that never return, a storage thread that stops."""

from __future__ import annotations

import pytest
from icehouse_server.engine.prefix_cache.tiers.storage_waits import StorageWaits

from tests.system.sim.scenario import HANGS_SEED, SimulationFailed
from tests.system.sim.stories import play

_STORY_COUNT = 40
_FIRST_NOTICING = HANGS_SEED + 23
"""The first story that notices an endless wait."""


def test_stories_whose_disk_hangs() -> None:
    seen = play(range(HANGS_SEED, HANGS_SEED + _STORY_COUNT))
    assert min(seen["hang reads"], seen["hang store"], seen["rest beside a hang"], seen["ssd tokens"]) > 0


def test_waiting_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageWaits, "_has_expired", lambda self, *wait: False)
    with pytest.raises(SimulationFailed):
        play(range(_FIRST_NOTICING, _FIRST_NOTICING + _STORY_COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(20))
def test_more_stories_whose_disk_hangs(chunk: int) -> None:
    first = HANGS_SEED + 1000 + 100 * chunk
    assert play(range(first, first + 100))["rest beside a hang"] > 0
