"""Counters of the engine, in the shape they are shown in, and the averages behind some of them."""

from __future__ import annotations

import collections
import dataclasses

from icehouse_server.averages import MovingAverage
from icehouse_server.domain.stats import EngineStats

_KEPT_COUNT = 512


def _last_times() -> collections.deque[float]:
    return collections.deque(maxlen=_KEPT_COUNT)


@dataclasses.dataclass(slots=True)
class Counters:
    """Kept by the engine's loop. `stats` is counted in; whoever is shown it gets a copy. Times in seconds."""

    stats: EngineStats = dataclasses.field(default_factory=EngineStats)
    service: MovingAverage = dataclasses.field(default_factory=MovingAverage)
    """How long a request holds a slot."""
    prefill_rate: MovingAverage = dataclasses.field(default_factory=MovingAverage)
    """Prompt tokens of a second."""
    passes_s: collections.deque[float] = dataclasses.field(default_factory=_last_times)
    """What the last passes took."""
    decode_steps_s: collections.deque[float] = dataclasses.field(default_factory=_last_times)
    """The same of those with rows, which drew their next token."""
