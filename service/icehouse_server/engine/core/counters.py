"""Counters of the engine, in the shape they are shown in, and the averages behind some of them."""

from __future__ import annotations

import collections

from icehouse_server.averages import MovingAverage, quantile
from icehouse_server.domain.stats import EngineStats

_KEPT_STEP_COUNT = 512


class Counters:
    """Kept by the engine's loop. `stats` is counted in; whoever is shown it gets a copy."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.service = MovingAverage()
        """How long a request holds a slot, in seconds."""
        self._prefill_rate = MovingAverage()
        self._decode_steps_s: collections.deque[float] = collections.deque(maxlen=_KEPT_STEP_COUNT)

    def note_prefill(self, token_count: int, elapsed_s: float) -> None:
        """Account for one prefill chunk."""
        self.stats.step_total += 1
        self.stats.prefilled_token_total += token_count
        self.stats.prefill_tokens_per_s = self._prefill_rate.add(token_count / max(elapsed_s, 1e-9))

    def note_decode(self, token_count: int, elapsed_s: float) -> None:
        """Account for one decode step."""
        self.stats.step_total += 1
        self.stats.output_token_total += token_count
        self._decode_steps_s.append(elapsed_s)

    def note_finished(self, service_s: float) -> None:
        """Account for a request that ran to its end."""
        self.stats.finished_total += 1
        self.service.add(service_s)

    def decode_step_quantile_s(self, share: float) -> float:
        """Return what `share` (0 to 1) of the last decode steps took less than; 0 before the first one."""
        return quantile(self._decode_steps_s, share)
