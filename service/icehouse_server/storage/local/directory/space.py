"""Space on disk: the size limit, the free-space floor, the daily budget, and files that are not blocks.

Owned by the storage thread. All real file bytes in the directory count: blocks, reserved or left-over
partial files, quarantine and the manifest.
"""

from __future__ import annotations

import enum

from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.disk_error import DiskErrorKind, classify
from icehouse_server.storage.files import Files, remove, size_at, write_anew
from icehouse_server.storage.storage_settings import StorageSettings
from icehouse_server.storage.store_paths import StorePaths

SECONDS_PER_DAY = 86_400
_QUARANTINE_LIMIT_COUNT = 64
"""Damaged files that are retained; one more replaces the oldest."""


class SpaceReclaim(enum.Enum):
    """The outcome of an attempt to free space."""

    READY = enum.auto()
    PROGRESS = enum.auto()
    """Something was removed; try again."""
    FULL = enum.auto()
    """Nothing more can be removed."""


def day_of(now_time: float) -> int:
    """Return the day (days since the epoch, UTC) of a time in seconds since the epoch."""
    return int(now_time // SECONDS_PER_DAY)


class ExtraFiles:
    """Files beside the blocks whose bytes count: those that could not be removed and are retried, damaged
    ones that are retained for a person while there is space, and foreign ones."""

    def __init__(self, files: Files, paths: StorePaths) -> None:
        self._files = files
        self._paths = paths
        self.leftovers: dict[str, int] = {}
        """Bytes by path."""
        self.quarantined: dict[BlockHash, int] = {}
        """Bytes by hash, oldest first."""
        self.aside: dict[str, int] = {}
        """Bytes of each manifest moved aside because it could not be used, by its path."""
        self.unknown_bytes = 0
        """Bytes of files that we did not name."""

    @property
    def size_bytes(self) -> int:
        sizes = (*self.leftovers.values(), *self.quarantined.values())
        return sum(sizes) + sum(self.aside.values()) + self.unknown_bytes

    def remove(self, path: str) -> None:
        """Remove a file, or remember it if that fails."""
        try:
            remove(self._files, path)
            self.leftovers.pop(path, None)
        except OSError:
            self.leftovers[path] = size_at(self._files, path) or 0

    def put_in_quarantine(self, block_hash: BlockHash, *, path: str) -> None:
        """Move a damaged file to quarantine, replacing an older one of the same block. Raises `OSError`."""
        target = self._paths.quarantined(block_hash)
        self._files.rename(path, target)
        self.leftovers.pop(target, None)
        self.quarantined.pop(block_hash, None)
        self.quarantined[block_hash] = self._files.stat(target).size_bytes
        self.trim_quarantine()

    def trim_quarantine(self) -> None:
        """Remove the oldest damaged files beyond the limit."""
        while len(self.quarantined) > _QUARANTINE_LIMIT_COUNT:
            self._drop_oldest()

    def reclaim(self) -> bool:
        """Remove one file that is retained for inspection; False if there is none."""
        if self.aside:
            path = next(iter(self.aside))
            del self.aside[path]
            self.remove(path)
        elif self.quarantined:
            self._drop_oldest()
        else:
            return False
        return True

    def _drop_oldest(self) -> None:
        block_hash = next(iter(self.quarantined))
        del self.quarantined[block_hash]
        self.remove(self._paths.quarantined(block_hash))


class Space:
    """The bytes in the directory beside the blocks, and the limits on all of them."""

    def __init__(self, settings: StorageSettings, extras: ExtraFiles) -> None:
        self._settings = settings
        self._extras = extras
        self.manifest_bytes = 0
        self.partial_bytes = 0
        """Bytes of files that are being written and are not blocks yet."""
        self.written_by_day: dict[int, int] = {}
        """Committed block bytes, by day: a clock that jumps over midnight and back begins no new budget."""

    def other_bytes(self) -> int:
        """Return the counted bytes that are not committed blocks."""
        return self.manifest_bytes + self.partial_bytes + self._extras.size_bytes

    def shortage_bytes(self, size_bytes: int, *, block_bytes: int, free_bytes: int) -> int:
        """Return how many bytes must be freed before `size_bytes` more may be written."""
        over_limit = block_bytes + self.other_bytes() + size_bytes - self._settings.limit_bytes
        under_floor = self._settings.free_floor_bytes + size_bytes - free_bytes
        return max(over_limit, under_floor, 0)

    def can_ever_fit(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` would fit if every block were evicted."""
        return size_bytes + self.manifest_bytes <= self._settings.limit_bytes

    def written_bytes(self, now_time: float) -> int:
        """Return the bytes committed on the day of a time in seconds since the epoch."""
        return self.written_by_day.get(day_of(now_time), 0)

    def note_written(self, size_bytes: int, *, now_time: float) -> None:
        self.written_by_day[day_of(now_time)] = self.written_bytes(now_time) + size_bytes

    def budget_allows(self, size_bytes: int, *, now_time: float) -> bool:
        """Return whether the day's budget allows writing `size_bytes` more."""
        total_bytes = self.written_bytes(now_time) + self.partial_bytes + size_bytes
        limit_bytes = self._settings.daily_write_limit_bytes
        return limit_bytes == 0 or total_bytes <= limit_bytes


BALLAST_BYTES = 512 << 10
"""Enough for the pages that deleting a batch of rows adds to the manifest's log."""


class BallastFile:
    """A file that exists to be removed: on a full disk, the space it frees is used to delete rows.

    It counts as part of what the size limit reserves for the manifest's log.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self.is_there = False

    def write(self) -> None:
        """Write the file. Raises `OSError`."""
        # Not zeros, because some file systems store those as nothing.
        write_anew(self._files, self._path, bytes(range(256)) * (BALLAST_BYTES // 256))
        self.is_there = True

    def free(self) -> bool:
        """Remove the file; False if there is none, or it cannot be removed."""
        was_there, self.is_there = self.is_there, False
        try:
            remove(self._files, self._path)
        except OSError:
            return False
        return was_there

    def is_disk_full(self) -> bool:
        """Return whether writing the file again fails for lack of space."""
        self.free()
        try:
            self.write()
        except OSError as error:
            return classify(error) is DiskErrorKind.FULL
        return False
