"""Space on disk: the size limit, the free-space floor and the daily budget.

Owned by the storage thread. The ledger counts real file bytes of everything in the
directory: blocks, reserved or left-over partials, quarantine and the manifest.
"""

from __future__ import annotations

import dataclasses
import enum

SECONDS_PER_DAY = 86_400
_DAY_LIMIT = 4


class Reclaim(enum.Enum):
    """What an attempt to make room achieved."""

    READY = enum.auto()
    PROGRESS = enum.auto()
    """Something was evicted; try again."""
    FULL = enum.auto()
    """Nothing more can be evicted."""


@dataclasses.dataclass(slots=True)
class Space:
    """The bytes in the directory beside the blocks, and the limits on all of them."""

    limit_bytes: int
    floor_bytes: int
    daily_limit_bytes: int
    """0 means unlimited."""
    manifest_bytes: int = 0
    quarantine_bytes: int = 0
    leftover_bytes: int = 0
    """Files that are neither blocks nor ours, or could not be removed."""
    partial_bytes: int = 0
    """Files that are being written: no blocks yet."""
    day: int = 0
    written_today_bytes: int = 0
    written_by_day: dict[int, int] = dataclasses.field(default_factory=dict)
    """Of the days before, as far as this process has seen them."""

    def other_bytes(self) -> int:
        """Return the counted bytes that are not committed blocks."""
        return self.manifest_bytes + self.quarantine_bytes + self.leftover_bytes + self.partial_bytes

    def shortage_bytes(self, size_bytes: int, *, block_bytes: int, free_bytes: int) -> int:
        """Return how many bytes must go before `size_bytes` more may be written; 0 when there is room."""
        over_limit = block_bytes + self.other_bytes() + size_bytes - self.limit_bytes
        under_floor = self.floor_bytes + size_bytes - free_bytes
        return max(over_limit, under_floor, 0)

    def can_ever_fit(self, size_bytes: int) -> bool:
        """Say whether `size_bytes` would fit if every block were evicted."""
        return size_bytes + self.manifest_bytes <= self.limit_bytes

    def budget_allows(self, size_bytes: int, *, now_time: float) -> bool:
        """Say whether the day's budget has room for a write; `now_time` in seconds since the epoch."""
        self.turn_day(now_time)
        written_bytes = self.written_today_bytes + self.partial_bytes
        return self.daily_limit_bytes == 0 or written_bytes + size_bytes <= self.daily_limit_bytes

    def turn_day(self, now_time: float) -> int:
        """Return the day (days since the epoch, UTC), starting a new budget when it has changed."""
        day = int(now_time // SECONDS_PER_DAY)
        if day != self.day:
            # A clock that goes back and forth over midnight begins no new budget each time.
            self.written_by_day[self.day] = self.written_today_bytes
            self.written_today_bytes = self.written_by_day.get(day, 0)
            self.written_by_day = dict(list(self.written_by_day.items())[-_DAY_LIMIT:])
            self.day = day
        return day
