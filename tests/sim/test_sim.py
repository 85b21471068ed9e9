"""Hundreds of seeded stories; any one can be played again: ICEHOUSE_SIM_SEED=n pytest tests/sim."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.sim.scenario import Scenario

_MEMORY = Path("/dev/shm")
"""Nothing here is about a medium's speed: memory does where the system offers it."""
_CHUNK = 25
_FAST_CHUNK_COUNT = 24
_SLOW_CHUNK_COUNT = 800


def play(seeds: Iterable[int]) -> Counter[str]:
    """Play stories one after the other and return what happened in them."""
    base = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None
    seen: Counter[str] = Counter()
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="icehouse-sim-", dir=base) as folder:
            scenario = Scenario(seed, Path(folder))
            scenario.play()
            seen += scenario.seen
    return seen
