"""Store state: open, full, broken or closed, with the reason and the time of the next retry.

The storage thread checks this alone to know whether it may write, and whether there is a directory to work
in. Times are `Clock.monotonic`.
"""

from __future__ import annotations

import dataclasses
import enum

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


class StoreStatus(enum.Enum):
    """What the directory can be used for."""

    OPEN = enum.auto()
    FULL = enum.auto()
    """Everything but writing blocks: there is no space for them."""
    BROKEN = enum.auto()
    """Nothing: rows and memory may differ, so it is opened anew at the next retry."""
    CLOSED = enum.auto()
    """Nothing: it was not opened yet, or will not be again."""


@dataclasses.dataclass(slots=True)
class StoreState:
    """The status, and how it changes."""

    status: StoreStatus = StoreStatus.CLOSED
    detail: str = ""
    """What is wrong and what would help; for callers too, so it names no path."""
    needed_bytes: int = 0
    """Free space above the floor that ends FULL."""
    _retry_time: float = 0.0
    _retry_s: float = _FIRST_RETRY_S

    @property
    def takes_blocks(self) -> bool:
        """Whether blocks may be written."""
        return self.status is StoreStatus.OPEN

    @property
    def is_usable(self) -> bool:
        """Whether there is an open directory: for orders, recency, reading."""
        return self.status in (StoreStatus.OPEN, StoreStatus.FULL)

    def open(self) -> None:
        """Note that the directory is open and has space."""
        self.status, self.detail, self.needed_bytes = StoreStatus.OPEN, "", 0

    def close(self) -> None:
        """Note that the directory was closed for good."""
        self.status, self.detail, self.needed_bytes = StoreStatus.CLOSED, "", 0

    def fill(self, detail: str, *, now: float, needed_bytes: int) -> None:
        """Stop writing until so many bytes are free."""
        self._fail(StoreStatus.FULL, detail, now=now, needed_bytes=needed_bytes)

    def break_down(self, detail: str, *, now: float) -> None:
        """Note that the directory was given up."""
        self._fail(StoreStatus.BROKEN, detail, now=now, needed_bytes=0)

    def note_write(self) -> None:
        """Note a success: the next failure is a new one."""
        self._retry_s = _FIRST_RETRY_S

    def is_retry_due(self, *, now: float) -> bool:
        """Return whether it is time to check whether the disk has recovered."""
        return self.status in (StoreStatus.FULL, StoreStatus.BROKEN) and now >= self._retry_time

    def _fail(self, status: StoreStatus, detail: str, *, now: float, needed_bytes: int) -> None:
        """Retry later; every further failure doubles the wait up to a minute."""
        self.status, self.detail, self.needed_bytes = status, detail, needed_bytes
        self._retry_time = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
