"""Counters of the engine, as stats show them, and the averages behind some of them."""

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
    """Kept by the engine loop, which counts in `stats`; readers get a copy. Times in seconds."""

    stats: EngineStats = dataclasses.field(default_factory=EngineStats)
    service: MovingAverage = dataclasses.field(default_factory=MovingAverage)
    """How long a request holds a slot."""
    prefill_rate: MovingAverage = dataclasses.field(default_factory=MovingAverage)
    """Prompt tokens per second."""
    passes_s: collections.deque[float] = dataclasses.field(default_factory=_last_times)
    """How long the latest passes took."""
    decode_steps_s: collections.deque[float] = dataclasses.field(default_factory=_last_times)
    """The same for passes with rows that drew their next token."""
