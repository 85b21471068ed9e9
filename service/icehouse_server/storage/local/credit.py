"""Credit: bounds on what waits for the storage thread, kept without a lock.

Each number below is written by exactly one thread and only ever grows; the other thread
reads it, at worst a moment late, and then the bound is kept too strictly, never too loosely.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.storage.settings import StorageSettings


class Meter:
    """Units (bytes or messages) taken by the engine's thread and given back by the storage thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken_total = 0
        self._given_back_total = 0

    @property
    def room(self) -> int:
        """Units that can be taken; more than that only after more were given back."""
        return self.limit - self.outstanding

    @property
    def outstanding(self) -> int:
        """Units taken and not given back."""
        return self._taken_total - self._given_back_total

    def try_take(self, units: int) -> bool:
        """Take units, or none when the limit would be passed. The engine's thread only."""
        if units > self.room:
            return False
        self._taken_total += units
        return True

    def give_back(self, units: int) -> None:
        """Give units back. The storage thread only."""
        self._given_back_total += units
        assert self._given_back_total <= self._taken_total, "More was given back than taken"


@dataclasses.dataclass(frozen=True, slots=True)
class Meters:
    """What waits: blocks to be written in bytes, reads and orders by count."""

    spills: Meter
    reads: Meter
    orders: Meter

    @classmethod
    def of(cls, settings: StorageSettings) -> Meters:
        """Return meters with the limits of these settings."""
        return cls(
            Meter(settings.spill_queue_limit_bytes),
            Meter(settings.load_queue_limit_count),
            Meter(settings.task_queue_limit_count),
        )
