"""Space on disk: the size limit, the free-space floor, the daily budget, and what is no block and counts too.

Owned by the storage thread. The ledger counts real file bytes of everything in the
directory: blocks, reserved or left-over partials, quarantine and the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum

from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.disk_error import DiskErrorKind, classify
from icehouse_server.storage.files import Files, remove, write_anew
from icehouse_server.storage.local.directory.commit import move_to_quarantine
from icehouse_server.storage.paths import StorePaths

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


_QUARANTINE_LIMIT_COUNT = 64
"""Damaged files kept to be looked at; the oldest goes when one more comes."""


class Quarantine:
    """Damaged block files, kept where a person can look at them while there is room."""

    def __init__(
        self, files: Files, paths: StorePaths, *, found: dict[BlockHash, int], leftovers: Leftovers
    ) -> None:
        """`found` are the bytes of those already there, oldest first; `leftovers` get what does not go."""
        self._leftovers = leftovers
        self._files = files
        self._paths = paths
        self._sizes = dict(found)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        """All quarantined bytes."""
        return sum(self._sizes.values())

    def take_in(self, block_hash: BlockHash, *, path: str) -> None:
        """Move a file in; an older one of the same block is replaced. Raises `OSError`."""
        move_to_quarantine(block_hash, path=path, files=self._files, paths=self._paths)
        self._leftovers.forget(self._paths.quarantined(block_hash))
        self._sizes.pop(block_hash, None)
        self._sizes[block_hash] = self._files.stat(self._paths.quarantined(block_hash)).size_bytes
        self.trim()

    def trim(self) -> None:
        """Remove the oldest files beyond the limit."""
        while len(self._sizes) > _QUARANTINE_LIMIT_COUNT:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Remove one file; one that does not go is a leftover."""
        block_hash = next(iter(self._sizes))
        del self._sizes[block_hash]
        self._leftovers.remove(self._paths.quarantined(block_hash))


BALLAST_BYTES = 512 << 10
"""Room for the pages that deleting a batch of rows writes to the manifest's log."""


class Ballast:
    """A file that is there to be removed: on a full disk rows can be deleted in the space it gives back.

    It counts as a part of what the size limit keeps for the manifest's log.
    """

    def __init__(self, files: Files, paths: StorePaths) -> None:
        self._files = files
        self._path = paths.ballast
        self.is_laid = False

    def lay(self) -> None:
        """Write it if it is not there; a disk that refuses goes without."""
        if self.is_laid:
            return
        with contextlib.suppress(OSError):
            self._write(self._path)
            self.is_laid = True

    def free(self) -> bool:
        """Remove it; False when there is none, or it does not go."""
        was_laid, self.is_laid = self.is_laid, False
        if not was_laid:
            return False
        try:
            self._files.unlink(self._path)
        except OSError:
            return False
        return True

    def is_refused(self) -> bool:
        """Say whether writing so much again fails for want of space."""
        if not self.free():
            # Without one the room below is what is tried.
            remove(self._files, self._path)
        try:
            self._write(self._path)
        except OSError as error:
            return classify(error) is DiskErrorKind.FULL
        self.is_laid = True
        return False

    def _write(self, path: str) -> None:
        # Not of zeros, which some file systems store as nothing.
        write_anew(self._files, path, bytes(range(256)) * (BALLAST_BYTES // 256))


class Leftovers:
    """Files without a row that could not be removed; tried again from time to time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def size_bytes(self) -> int:
        """All bytes left over."""
        return sum(self._sizes.values())

    def remove(self, path: str) -> None:
        """Remove a file, or remember it."""
        try:
            remove(self._files, path)
        except OSError:
            self.note(path)

    def note(self, path: str) -> None:
        """Remember a file if it is there."""
        try:
            self._sizes[path] = self._files.stat(path).size_bytes
        except FileNotFoundError:
            return

    def forget(self, path: str) -> None:
        """A block has this path again."""
        self._sizes.pop(path, None)

    def retry(self) -> None:
        """Try to remove each of them once more."""
        for path in list(self._sizes):
            with contextlib.suppress(OSError):
                remove(self._files, path)
                del self._sizes[path]
