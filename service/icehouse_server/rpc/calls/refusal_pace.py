"""Refusal pace: how soon a caller hears that it is refused, so that a flood of refused calls costs little.

A refused call takes the event loop nearly as long as a short one that is served, and whoever comes again at
once never stops. The first of a caller's refusals are told at once; beyond so many in a second each waits for
its turn, up to some time. Owned by the event loop.
"""

from __future__ import annotations

RATE_PER_S = 20.0
BURST_COUNT = 64
LONGEST_S = 1.0
"""A balancer wants to hear soon that another server is to be tried."""
LONGEST_UNPROVED_S = 5.0
"""Nobody who may call waits for that."""
_KEPT_COUNT = 1024
"""Callers that are remembered; those whose turn has passed are let go first."""


class RefusalPace:
    """A schedule for each caller. Times in seconds, of any one clock."""

    def __init__(self) -> None:
        self._due_times: dict[str, float] = {}

    def delay_s(self, origin: str, *, now: float, longest_s: float) -> float:
        """Return how long a caller's next refusal is kept back, and count it."""
        earliest = now - BURST_COUNT / RATE_PER_S
        due_time = max(self._due_times.get(origin, earliest), earliest) + 1 / RATE_PER_S
        # Nobody falls behind by more than it may be kept waiting.
        self._due_times[origin] = due_time = min(due_time, now + longest_s)
        if len(self._due_times) > _KEPT_COUNT:
            self._forget(now)
        return max(0.0, due_time - now)

    def _forget(self, now: float) -> None:
        waiting = [(origin, due) for origin, due in self._due_times.items() if due > now]
        self._due_times = dict(waiting[-_KEPT_COUNT // 2 :])
