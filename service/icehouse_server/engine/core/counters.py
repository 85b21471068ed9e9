"""Counters of the engine, kept by its loop and shown as a frozen snapshot."""

from __future__ import annotations

import collections
import dataclasses

_KEPT_STEP_COUNT = 512
_SMOOTHING = 0.2


@dataclasses.dataclass(slots=True)
class Counters:
    """Totals since start, and the last decode step durations in seconds."""

    accepted_total: int = 0
    rejected_total: int = 0
    finished_total: int = 0
    cancelled_total: int = 0
    failed_total: int = 0
    prompt_token_total: int = 0
    cached_token_total: int = 0
    prefilled_token_total: int = 0
    output_token_total: int = 0
    step_total: int = 0
    parked_total: int = 0
    prefill_tokens_per_s: float = 0.0
    service_s: float = 0.0
    """How long a request holds a slot, moving average."""
    decode_steps_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT_STEP_COUNT)
    )

    def note_pass(self, *, prefilled_token_count: int, output_token_count: int) -> None:
        """Account for what a forward pass ran and what came of it."""
        self.step_total += 1
        self.prefilled_token_total += prefilled_token_count
        self.output_token_total += output_token_count

    def note_prefill_rate(self, token_count: int, elapsed_s: float) -> None:
        """Account for the part of a pass that its prompt tokens took."""
        rate = token_count / max(elapsed_s, 1e-9)
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if old == 0.0 else old + _SMOOTHING * (rate - old)

    def note_decode_step(self, elapsed_s: float) -> None:
        """Account for a pass in which rows drew their next token."""
        self.decode_steps_s.append(elapsed_s)

    def note_finished(self, service_s: float) -> None:
        """Account for a request that ran to its end."""
        self.finished_total += 1
        old = self.service_s
        self.service_s = service_s if old == 0.0 else old + _SMOOTHING * (service_s - old)

    def decode_step_quantile_s(self, quantile: float) -> float:
        """Return the `quantile` (0..1) of the last decode steps; 0 before the first one."""
        ordered = sorted(self.decode_steps_s)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else 0.0
