"""Pace at which each caller may do something over and over. Whoever is faster is kept waiting."""

from __future__ import annotations

import collections
import math

_REMEMBERED = 1024
"""Names; beyond that the one that was silent longest begins anew."""


class Pace:
    """Counts by name: `at_once` without a wait, then `per_s`, and nobody waits longer than `longest_s`."""

    def __init__(self, *, per_s: float, at_once: float, longest_s: float) -> None:
        self._per_s = per_s
        self._ahead_s = at_once / per_s
        self._longest_s = longest_s
        self._due_times: collections.OrderedDict[str, float] = collections.OrderedDict()

    def delay_s(self, name: str, now: float, *, count: float = 1.0) -> float:
        """Count what is done now; return how long it has to wait."""
        earlier = self._due_times.get(name, -math.inf)
        due_time = max(earlier, now - self._ahead_s) + count / self._per_s
        self._due_times[name] = due_time = min(due_time, now + self._longest_s)
        self._due_times.move_to_end(name)
        if len(self._due_times) > _REMEMBERED:
            self._due_times.popitem(last=False)
        return max(0.0, due_time - now)
