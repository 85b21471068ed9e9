"""Causes of the slowest gaps between two tokens of a reply, inferred from concurrent replies."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from bench.replies import Reply, quantile

_SAME_STEP_S = 0.003
"""Tokens of one decode step reach their callers within about this time."""
_SLOW_SHARE = 0.99


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """The time between two neighbouring tokens of one reply."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


def gaps_of(reply: Reply) -> list[Gap]:
    """Return a reply's gaps in order."""
    times = reply.token_times_s
    return [Gap(a, b) for a, b in itertools.pairwise(times)]


def slow_gap_kinds(replies: Sequence[Reply]) -> Mapping[str, float]:
    """Return, of the slowest 1 % of all gaps, the share in which others joined, left or were prefilled.

    A gap counts by the first of these that fits: another reply's first token came with its end; another
    reply ended at its beginning; another reply waited for its first token meanwhile; none of them.
    """
    everything = [(gap, reply) for reply in replies for gap in gaps_of(reply)]
    limit_s = quantile([gap.duration_s for gap, _ in everything], _SLOW_SHARE)
    slow = [(gap, reply) for gap, reply in everything if gap.duration_s >= limit_s]
    counts = collections.Counter(_kind(gap, [r for r in replies if r is not own]) for gap, own in slow)
    return {kind: count / len(slow) for kind, count in counts.most_common()}


def _kind(gap: Gap, others: Sequence[Reply]) -> str:
    if any(abs(r.token_times_s[0] - gap.end_s) < _SAME_STEP_S for r in others):
        return "joined"
    if any(abs(r.token_times_s[-1] - gap.begin_s) < _SAME_STEP_S for r in others):
        return "left"
    if any(r.start_time_s < gap.end_s and r.token_times_s[0] > gap.begin_s for r in others):
        return "prefill"
    return "decode only"
