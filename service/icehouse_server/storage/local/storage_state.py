"""Storage state: whether the storage thread may write, and how much waits to be written.

`status` alone tells the storage thread whether it has a directory to work in. Times are
`Clock.monotonic`.
"""

from __future__ import annotations

import enum

from icehouse_server.domain.blocks import BlockDamage
from icehouse_server.domain.cache_stats import IntegrityStats
from icehouse_server.storage.api import StorageFailure
from icehouse_server.storage.local.codec_choice import CodecChoice, try_decoder
from icehouse_server.storage.storage_settings import StorageSettings

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


class QueueLimit:
    """Units (bytes or messages) that the engine's thread reserves and the storage thread releases, lock-free.

    Each counter is written by exactly one thread and only ever grows. The other thread may read a slightly
    old value; then the bound is too strict, never too loose.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reserved_total = 0
        self._released_total = 0

    @property
    def used(self) -> int:
        return self._reserved_total - self._released_total

    @property
    def free(self) -> int:
        return self.limit - self.used

    def try_reserve(self, units: int) -> bool:
        """Reserve units, or none if that would exceed the limit. The engine's thread only."""
        if units > self.free:
            return False
        self._reserved_total += units
        return True

    def release(self, units: int) -> None:
        """Release units. The storage thread only."""
        self._released_total += units
        assert self._released_total <= self._reserved_total, "More was released than reserved"


class StoreStatus(enum.Enum):
    """What the directory can be used for."""

    OPEN = enum.auto()
    FULL = enum.auto()
    """Everything except writing blocks: there is no space for them."""
    BROKEN = enum.auto()
    """Nothing: rows and memory may differ, so it is reopened at the next retry."""
    CLOSED = enum.auto()
    """Nothing: it is not open yet, or will not be again."""


class StorageState:
    """The status and its changes, and the state that all models' writes and reads share."""

    def __init__(self, settings: StorageSettings) -> None:
        self.status = StoreStatus.CLOSED
        self.detail = ""
        """What is wrong and what would help; callers see it too, so it names no path."""
        self.needed_bytes = 0
        """Free space above the floor that ends FULL."""
        self._retry_time = 0.0
        self._retry_s = _FIRST_RETRY_S
        self.spill_queue = QueueLimit(settings.spill_queue_limit_bytes)
        """Bytes of all models' blocks to be written."""
        self.write_bytes_per_s = 0.0
        """Moving average over the recent blocks of all models."""
        self.codec = CodecChoice(
            settings.codec, tried_bytes_per_s=try_decoder(reader_count=settings.reader_thread_count)
        )

    @property
    def takes_blocks(self) -> bool:
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

    def note_write(self) -> None:
        """Note a success, so that the next failure starts with the shortest wait."""
        self._retry_s = _FIRST_RETRY_S

    def is_retry_due(self, *, now: float) -> bool:
        """Return whether it is time to check if the disk has recovered."""
        return self.status in (StoreStatus.FULL, StoreStatus.BROKEN) and now >= self._retry_time

    def fail(self, status: StoreStatus, detail: str, *, now: float, needed_bytes: int = 0) -> None:
        """Note that the directory is FULL until `needed_bytes` are free, or was given up as BROKEN, and retry
        later; every further failure doubles the wait, up to a minute."""
        self.status, self.detail, self.needed_bytes = status, detail, needed_bytes
        self._retry_time = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)


def note_damage(integrity: IntegrityStats, failure: StorageFailure) -> None:
    """Count a block that a load or `verify` could not use."""
    match failure.cause:
        case BlockDamage.CHECKSUM:
            integrity.checksum_failure_total += 1
        case BlockDamage.MISMATCH | BlockDamage.HEADER | BlockDamage.LAYOUT | BlockDamage.OTHER_ABI:
            integrity.header_mismatch_total += 1
        case BlockDamage.MISSING | BlockDamage.TRUNCATED | BlockDamage.IO:
            integrity.missing_file_total += 1
        case BlockDamage.AUTH_TAG:
            integrity.seal_failure_total += 1
        case _:
            pass  # the file is not at fault
