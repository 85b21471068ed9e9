"""Space on disk: the size limit, the free-space floor, the daily budget, and files that are not blocks.

Owned by the storage thread. All real file bytes in the directory count: blocks, reserved or left-over
partials, quarantine and the manifest.
"""

from __future__ import annotations

import dataclasses
import enum

from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.disk_error import DiskErrorKind, classify
from icehouse_server.storage.files import Files, remove, size_at, write_anew
from icehouse_server.storage.store_paths import StorePaths

SECONDS_PER_DAY = 86_400


class Reclaim(enum.Enum):
    """The outcome of an attempt to free space."""

    READY = enum.auto()
    PROGRESS = enum.auto()
    """Something was removed; try again."""
    FULL = enum.auto()
    """Nothing more can be removed."""


def day_of(now_time: float) -> int:
    """Return the day (days since the epoch, UTC) of a time in seconds since the epoch."""
    return int(now_time // SECONDS_PER_DAY)


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
    """Files that are being written, not blocks yet."""
    written_by_day: dict[int, int] = dataclasses.field(default_factory=dict)
    """Bytes of committed blocks. By day, so that a clock that jumps over midnight begins no new budget."""

    def other_bytes(self) -> int:
        """Return the counted bytes that are not committed blocks."""
        return self.manifest_bytes + self.quarantine_bytes + self.leftover_bytes + self.partial_bytes

    def shortage_bytes(self, size_bytes: int, *, block_bytes: int, free_bytes: int) -> int:
        """Return how many bytes must be freed before `size_bytes` more may be written."""
        over_limit = block_bytes + self.other_bytes() + size_bytes - self.limit_bytes
        under_floor = self.floor_bytes + size_bytes - free_bytes
        return max(over_limit, under_floor, 0)

    def can_ever_fit(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` would fit if every block were evicted."""
        return size_bytes + self.manifest_bytes <= self.limit_bytes

    def written_bytes(self, now_time: float) -> int:
        """Return the bytes committed on the day of a time in seconds since the epoch."""
        return self.written_by_day.get(day_of(now_time), 0)

    def note_written(self, size_bytes: int, *, now_time: float) -> None:
        """Count a commit."""
        self.written_by_day[day_of(now_time)] = self.written_bytes(now_time) + size_bytes

    def budget_allows(self, size_bytes: int, *, now_time: float) -> bool:
        """Return whether the day's budget allows to write `size_bytes` more."""
        total_bytes = self.written_bytes(now_time) + self.partial_bytes + size_bytes
        return self.daily_limit_bytes == 0 or total_bytes <= self.daily_limit_bytes


class Leftovers:
    """Files without a row that could not be removed; tried again from time to time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.sizes: dict[str, int] = {}
        """Bytes by path."""

    def remove(self, path: str) -> None:
        """Remove a file, or remember it if that fails."""
        try:
            remove(self._files, path)
            self.sizes.pop(path, None)
        except OSError:
            self.sizes[path] = size_at(self._files, path) or 0

    def retry(self) -> None:
        """Try to remove each of them once more."""
        for path in list(self.sizes):
            self.remove(path)


_QUARANTINE_LIMIT_COUNT = 64
"""Damaged files that are retained; one more replaces the oldest."""


class Quarantine:
    """Damaged block files, retained for a person to inspect while there is space."""

    def __init__(self, files: Files, paths: StorePaths, leftovers: Leftovers) -> None:
        self._leftovers = leftovers
        self._files = files
        self._paths = paths
        self.sizes: dict[BlockHash, int] = {}
        """Bytes by hash, oldest first."""

    def move_in(self, block_hash: BlockHash, *, path: str) -> None:
        """Move a file in, replacing an older one of the same block. Raises `OSError`."""
        target = self._paths.quarantined(block_hash)
        self._files.rename(path, target)
        self._leftovers.sizes.pop(target, None)
        self.sizes.pop(block_hash, None)
        self.sizes[block_hash] = self._files.stat(target).size_bytes
        self.trim()

    def trim(self) -> None:
        """Remove the oldest files beyond the limit."""
        while len(self.sizes) > _QUARANTINE_LIMIT_COUNT:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Remove one file; one that cannot be removed is a leftover."""
        block_hash = next(iter(self.sizes))
        del self.sizes[block_hash]
        self._leftovers.remove(self._paths.quarantined(block_hash))


BALLAST_BYTES = 512 << 10
"""Enough for the pages that deleting a batch of rows writes to the manifest's log."""


class Ballast:
    """A file that exists to be removed: on a full disk, rows can be deleted in the space it frees.

    It counts as part of what the size limit reserves for the manifest's log.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self.is_there = False

    def write(self) -> None:
        """Write it. Raises `OSError`."""
        # Not zeros, which some file systems store as nothing.
        write_anew(self._files, self._path, bytes(range(256)) * (BALLAST_BYTES // 256))
        self.is_there = True

    def free(self) -> bool:
        """Remove it; False when there is none, or it cannot be removed."""
        was_there, self.is_there = self.is_there, False
        try:
            remove(self._files, self._path)
        except OSError:
            return False
        return was_there

    def is_disk_full(self) -> bool:
        """Return whether writing it again fails for lack of space."""
        self.free()
        try:
            self.write()
        except OSError as error:
            return classify(error) is DiskErrorKind.FULL
        return False
