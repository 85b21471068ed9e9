"""Credit: bounds on what waits for the storage thread, kept without a lock.

Each number below is written by exactly one thread and only ever grows; the other thread
reads it, at worst a moment late, and then the bound is kept too strictly, never too loosely.
"""

from __future__ import annotations


class Meter:
    """Units (bytes or messages) taken by the engine's thread and given back by the storage thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken_total = 0
        self._given_back_total = 0

    @property
    def outstanding(self) -> int:
        """Units taken and not given back."""
        return self._taken_total - self._given_back_total

    def try_take(self, units: int) -> bool:
        """Take units, or none when the limit would be passed. The engine's thread only."""
        if self.outstanding + units > self.limit:
            return False
        self._taken_total += units
        return True

    def cancel(self, units: int) -> None:
        """Undo a `try_take` whose units never went to the storage thread. The engine's thread only."""
        self._taken_total -= units

    def give_back(self, units: int) -> None:
        """Give units back. The storage thread only."""
        self._given_back_total += units
        assert self._given_back_total <= self._taken_total, "More was given back than taken"


class Credit:
    """Room in the spill queue for one block, held from before its copy until its outcome."""

    __slots__ = ("_meter", "size_bytes")

    def __init__(self, meter: Meter, size_bytes: int) -> None:
        self._meter = meter
        self.size_bytes = size_bytes

    def cancel(self) -> None:
        """Return the room unused. The engine's thread only, and only instead of `spill`."""
        self._meter.cancel(self.size_bytes)

    def release(self) -> None:
        """Return the room after the outcome. The storage thread only."""
        self._meter.give_back(self.size_bytes)
