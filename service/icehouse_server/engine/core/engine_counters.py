"""Counters of the engine, in the shape they are shown in, and the averages behind some of them."""

from __future__ import annotations

import collections

from icehouse_server.averages import MovingAverage
from icehouse_server.domain.request import DraftCounts
from icehouse_server.domain.stats import EngineStats

_KEPT_STEP_COUNT = 512


class Counters:
    """Kept by the engine's loop. `stats` is counted in; whoever is shown it gets a copy."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.service = MovingAverage()
        """How long a request holds a slot, in seconds."""
        self._prefill_rate = MovingAverage()
        self.passes_s: collections.deque[float] = collections.deque(maxlen=_KEPT_STEP_COUNT)
        """What the last passes took."""
        self.decode_steps_s: collections.deque[float] = collections.deque(maxlen=_KEPT_STEP_COUNT)
        """The same of those with rows, which drew their next token."""

    def note_pass(self, *, prefilled_token_count: int, output_token_count: int) -> None:
        """Account for what a forward pass ran and what came of it."""
        self.stats.step_total += 1
        self.stats.prefilled_token_total += prefilled_token_count
        self.stats.output_token_total += output_token_count

    def note_prefill_rate(self, token_count: int, elapsed_s: float) -> None:
        """Account for the part of a pass that its prompt tokens took."""
        self.stats.prefill_tokens_per_s = self._prefill_rate.add(token_count / max(elapsed_s, 1e-9))

    def note_pass_time(self, elapsed_s: float, *, has_rows: bool) -> None:
        """Account for what a pass took."""
        self.passes_s.append(elapsed_s)
        if has_rows:
            self.decode_steps_s.append(elapsed_s)

    def note_drafts(self, step: DraftCounts) -> None:
        """Account for what one row's speculation came to in a pass."""
        self.stats.drafted_token_total += step.proposed_count
        self.stats.accepted_draft_token_total += step.accepted_count

    def note_finished(self, service_s: float) -> None:
        """Account for a request that ran to its end."""
        self.stats.finished_total += 1
        self.service.add(service_s)
