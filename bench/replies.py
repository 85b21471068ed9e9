"""Replies as callers saw them, and the metrics of a round of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Arrival times of one reply's tokens, in seconds of one process's monotonic clock."""

    start_time_s: float
    token_times_s: tuple[float, ...]
    token_ids: tuple[int, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds from the call to the first token."""
        return self.token_times_s[0] - self.start_time_s


@dataclasses.dataclass(frozen=True, slots=True)
class RoundMetrics:
    """One round of clients that started together. `decode_tokens_per_s` is None without a steady stretch."""

    token_count: int
    tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_worst_s: float
    itl_p50_s: float
    itl_p99_s: float


_STEADY_STEP_COUNT = 4
"""A stretch of fewer tokens per client than this says nothing about decoding."""


def measure(replies: Sequence[Reply]) -> RoundMetrics:
    """Return the metrics of one round; every reply has at least one token."""
    starts = [reply.start_time_s for reply in replies]
    last = max(reply.token_times_s[-1] for reply in replies)
    token_count = sum(len(reply.token_times_s) for reply in replies)
    ttfts = [reply.ttft_s for reply in replies]
    gaps = [b - a for r in replies for a, b in zip(r.token_times_s, r.token_times_s[1:], strict=False)]
    return RoundMetrics(
        token_count=token_count,
        tokens_per_s=token_count / (last - min(starts)),
        decode_tokens_per_s=_steady_rate(replies),
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p95_s=quantile(ttfts, 0.95),
        ttft_worst_s=max(ttfts),
        itl_p50_s=quantile(gaps, 0.5),
        itl_p99_s=quantile(gaps, 0.99),
    )


def gaps_inside(times_s: Sequence[float], *, start_s: float, stop_s: float) -> list[float]:
    """Return the times between two tokens that are wholly inside a stretch."""
    return [b - a for a, b in itertools.pairwise(times_s) if start_s <= a and b <= stop_s]


def gaps_overlapping(times_s: Sequence[float], *, start_s: float, stop_s: float) -> list[float]:
    """Return the times between two tokens that overlap a stretch, at full length."""
    return [b - a for a, b in itertools.pairwise(times_s) if b > start_s and a < stop_s]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the linearly interpolated `share` (0..1) quantile; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _steady_rate(replies: Sequence[Reply]) -> float | None:
    """Return tokens per second while every client decodes: from the last first token to the first end."""
    began = max(reply.token_times_s[0] for reply in replies)
    ended = min(reply.token_times_s[-1] for reply in replies)
    inside = sum(began < at <= ended for reply in replies for at in reply.token_times_s)
    if ended <= began or inside < _STEADY_STEP_COUNT * len(replies):
        return None
    return inside / (ended - began)
