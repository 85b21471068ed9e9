"""Pace: how soon a caller's turn comes, so that one who comes again at once, for ever, costs little.

A refused call takes the event loop nearly as long as a short one that is served, and one with a long message
as long as many. The first of a caller's refusals are told at once; beyond so many in a second each waits for
its turn, up to some time. So does who subscribes to KV events. Owned by the event loop.
"""

from __future__ import annotations

REFUSALS_PER_S = 20.0
REFUSAL_BURST_COUNT = 64
REFUSED_BYTES_PER_TURN = 256 << 10
"""A refused request of so many bytes counts as one more refusal."""
LONGEST_S = 1.0
"""A balancer wants to hear soon that another server is to be tried."""
LONGEST_UNPROVED_S = 5.0
"""Nobody who may call waits for that."""
_KEPT_COUNT = 1024
"""Callers that are remembered; those whose turn has passed are let go first."""


class Pace:
    """A schedule for each caller: so many at once, then so many a second. Times of any one clock."""

    def __init__(self, *, rate_per_s: float, burst_count: int) -> None:
        self._interval_s = 1 / rate_per_s
        self._burst_count = burst_count
        self._due_times: dict[str, float] = {}

    def delay_s(self, origin: str, *, now: float, longest_s: float, turn_count: float = 1) -> float:
        """Return how long the end of a caller's next turns is away, and count them."""
        earliest = now - self._burst_count * self._interval_s
        due_time = max(self._due_times.get(origin, earliest), earliest) + turn_count * self._interval_s
        # Nobody falls behind by more than it may be kept waiting.
        self._due_times[origin] = due_time = min(due_time, now + longest_s)
        if len(self._due_times) > _KEPT_COUNT:
            self._forget(now)
        return max(0.0, due_time - now)

    def _forget(self, now: float) -> None:
        waiting = [(origin, due) for origin, due in self._due_times.items() if due > now]
        self._due_times = dict(waiting[-_KEPT_COUNT // 2 :])
