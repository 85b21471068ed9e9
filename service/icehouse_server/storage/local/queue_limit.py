"""Queue limits: bounds on what waits for the storage thread, without a lock.

Each counter is written by exactly one thread and only ever grows. The other thread reads it, perhaps a
moment late; then the bound is too strict, never too loose.
"""

from __future__ import annotations

import dataclasses


class QueueLimit:
    """Units (bytes or messages) reserved by the engine's thread and released by the storage thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reserved_total = 0
        self._released_total = 0

    @property
    def used(self) -> int:
        """Units reserved and not released."""
        return self._reserved_total - self._released_total

    @property
    def free(self) -> int:
        """Units that can be reserved now."""
        return self.limit - self.used

    def try_reserve(self, units: int) -> bool:
        """Reserve units, or none when that would pass the limit. The engine's thread only."""
        if units > self.free:
            return False
        self._reserved_total += units
        return True

    def release(self, units: int) -> None:
        """Release units. The storage thread only."""
        self._released_total += units
        assert self._released_total <= self._reserved_total, "More was released than reserved"


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """Of blocks to be written in bytes, of reads and of orders by count."""

    spills: QueueLimit
    reads: QueueLimit
    orders: QueueLimit
