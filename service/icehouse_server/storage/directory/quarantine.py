"""Quarantine: files in the cache directory that are no blocks any more, and ones that would not go.

Owned by the storage thread. Both count against the size limit until they are gone.
"""

from __future__ import annotations

import contextlib

from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.directory.commit import move_to_quarantine
from icehouse_server.storage.disk_error import DiskErrorKind, classify
from icehouse_server.storage.files import Files
from icehouse_server.storage.paths import StorePaths

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
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(self._path)
        try:
            self._write(self._path)
        except OSError as error:
            return classify(error) is DiskErrorKind.FULL
        self.is_laid = True
        return False

    def _write(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)
        descriptor = self._files.create(path)
        try:
            # Not of zeros, which some file systems store as nothing.
            self._files.write(descriptor, [bytes(range(256)) * (BALLAST_BYTES // 256)], offset=0)
        finally:
            self._files.close(descriptor)


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
            self._files.unlink(path)
        except FileNotFoundError:
            return
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
            try:
                self._files.unlink(path)
            except FileNotFoundError:
                del self._sizes[path]
            except OSError:
                continue
            else:
                del self._sizes[path]
