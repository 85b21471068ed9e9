"""A clock that moves on a little with every reading, so that rates and budgets mean something."""

from __future__ import annotations

_FIRST_WALL_TIME = 1_700_000_000.0


class SimClock:
    """The clock of one story."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 0.0002
        return self.now

    def wall(self) -> float:
        return _FIRST_WALL_TIME + self.now
