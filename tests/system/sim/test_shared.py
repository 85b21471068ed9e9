"""Stories of a server with an object store that fails and lies, and what must be noticed there."""

from __future__ import annotations

import os

import pytest
from icehouse_server.storage.files import opened
from icehouse_server.storage.local.block_format.block_file import read_head
from icehouse_server.storage.shared.block_folder import BlockFolder

from tests.system.sim.scenario import SHARED_SEED, SimulationFailed
from tests.system.sim.stories import play

pytestmark = pytest.mark.skipif("ICEHOUSE_SIM_SEED" in os.environ, reason="one story was asked for")

_STORY_COUNT = 12
_FIRST_SEED = SHARED_SEED
"""Where the search for the fault begins."""


def test_a_fickle_store_breaks_no_promise() -> None:
    seen = play(range(SHARED_SEED, SHARED_SEED + _STORY_COUNT))
    assert seen["Found"] and seen["Fetched"]


def test_some_story_notices_that_objects_are_taken_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    def sound(self: BlockFolder, path: str, name: bytes):
        with opened(self._files, path) as descriptor:
            return read_head(self._files, descriptor, cipher=self.cipher)

    monkeypatch.setattr(BlockFolder, "_sound", sound)
    with pytest.raises(SimulationFailed, match="play it again with ICEHOUSE_SIM_SEED=") as found:
        play(range(_FIRST_SEED, _FIRST_SEED + 300))
    assert not isinstance(found.value.__cause__, TypeError | AttributeError), "the break itself is broken"
