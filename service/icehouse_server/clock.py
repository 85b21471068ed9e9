"""Clock: the only place that reads the time. Everything else is given a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back. For durations and deadlines."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch. For times that are stored or shown."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
