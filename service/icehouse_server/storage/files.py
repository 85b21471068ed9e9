"""Files: the seam to the file system, the few verbs the SSD tier uses, and the real ones.

Every file the cache writes goes through a `Files`, so that a test can make each verb fail
once, or stop the world after it. SQLite does its own I/O and is not behind this seam.
Every verb raises `OSError` with the operating system's errno; none of them logs or retries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import stat as stat_module
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

_log = logging.getLogger(__name__)

Buffer = bytes | memoryview

_NOT_SUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})

_IOV_LIMIT = 1024
"""Most buffers of one vectored call: Linux's and macOS's IOV_MAX."""
_CALL_LIMIT_BYTES = 1 << 30
"""Most bytes of one vectored call: macOS refuses 2 GiB and more with EINVAL."""

_INODE_MASK = (1 << 63) - 1

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


@dataclasses.dataclass(frozen=True, slots=True)
class FileInfo:
    """What a directory entry says about itself. A symbolic link is not followed."""

    name: str
    size_bytes: int
    mtime_ns: int
    """Of the system's clock tick, often some milliseconds: two files may share one."""
    inode: int
    """Stays with the file through a rename, so it tells two swapped files apart."""
    is_directory: bool
    is_link: bool = False
    mode: int = 0o600
    """Permission bits."""
    owner_id: int = -1
    """The user whose it is; -1 when nobody asked."""


class Files(Protocol):
    """What the cache may do to a disk. Paths are absolute; descriptors are the system's."""

    def make_dir(self, path: str) -> None:
        """Create a directory, mode 0700, and the parents it lacks; an existing one is fine."""
        ...

    def create(self, path: str) -> int:
        """Create a file that must not exist, mode 0600, and open it for writing."""
        ...

    def write(self, descriptor: int, parts: Sequence[Buffer], *, offset: int) -> int:
        """Write all parts in order from `offset` and return their bytes. A short write is continued."""
        ...

    def fsync(self, descriptor: int) -> None:
        """Return when the file's bytes are on the medium."""
        ...

    def close(self, descriptor: int) -> None:
        """Close a descriptor; it is gone even when this raises."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file its new name in one step, replacing what had it."""
        ...

    def fsync_dir(self, path: str) -> None:
        """Return when the names in a directory are on the medium."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file."""
        ...

    def list(self, path: str) -> list[FileInfo]:
        """Return the entries of a directory, in any order."""
        ...

    def stat(self, path: str) -> FileInfo:
        """Return what is at a path."""
        ...

    def open(self, path: str) -> int:
        """Open a file for reading."""
        ...

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        """Fill the parts in order from `offset` and return the bytes read; fewer only at the end of file."""
        ...

    def size(self, descriptor: int) -> int:
        """Return the bytes of an open file."""
        ...

    def free_bytes(self, path: str) -> int:
        """Return the bytes an unprivileged process may still write beside `path`."""
        ...

    def lock(self, path: str, *, owner: str) -> int:
        """Take the exclusive lock file and write `owner` into it; raises BlockingIOError when it is held."""
        ...

    def is_at(self, descriptor: int, path: str) -> bool:
        """Say whether an open file is still the one with this name."""
        ...


class SystemFiles:
    """The operating system's files."""

    def __init__(self) -> None:
        self._can_flush_drive = True

    def make_dir(self, path: str) -> None:
        # Not by makedirs, whose mode is that of the last folder alone.
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=DIRECTORY_MODE)

    def create(self, path: str) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)

    def write(self, descriptor: int, parts: Sequence[Buffer], *, offset: int) -> int:
        pending = [view for part in parts if (view := memoryview(part)).nbytes]
        written_bytes = 0
        while pending:
            written = os.pwritev(descriptor, _batch(pending), offset + written_bytes)
            if written == 0:
                raise OSError(errno.EIO, "The system wrote 0 bytes and named no reason")
            written_bytes += written
            pending = _advance(pending, written)
        return written_bytes

    def fsync(self, descriptor: int) -> None:
        if self._can_flush_drive and hasattr(fcntl, "F_FULLFSYNC"):
            # On macOS fsync() leaves the bytes in the drive's own cache.
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                # Network and some foreign file systems have no such thing; SQLite does as much there.
                self._can_flush_drive = False
                _log.warning("drive_cache_not_flushed", extra={"detail": str(error)})
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def fsync_dir(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def list(self, path: str) -> list[FileInfo]:
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                # What was renamed or removed since is not there.
                with contextlib.suppress(FileNotFoundError):
                    found.append(_info(entry.name, entry.stat(follow_symlinks=False)))
        return found

    def stat(self, path: str) -> FileInfo:
        info = os.lstat(path)
        return _info(os.path.basename(path), info)

    def open(self, path: str) -> int:
        # O_NOFOLLOW: a link planted in the directory must not make us read another file. O_NONBLOCK: nor a
        # pipe have us wait for its writer; to files it is nothing.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        pending = [part for part in parts if part.nbytes]
        read_bytes = 0
        while pending:
            got = os.preadv(descriptor, _batch(pending), offset + read_bytes)
            if got == 0:
                break
            read_bytes += got
            pending = _advance(pending, got)
        return read_bytes

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def free_bytes(self, path: str) -> int:
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def lock(self, path: str, *, owner: str) -> int:
        # O_NOFOLLOW: a link planted here must not have us write into another file.
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_at(self, descriptor: int, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(path))
        except FileNotFoundError:
            return False


def read_text(files: Files, path: str, *, limit_bytes: int) -> str:
    """Return the beginning of a small text file; bytes that are not UTF-8 are replaced."""
    descriptor = files.open(path)
    try:
        buffer = bytearray(limit_bytes)
        got = files.read_into(descriptor, [memoryview(buffer)], offset=0)
    finally:
        files.close(descriptor)
    return buffer[:got].decode("utf-8", errors="replace")


def _info(name: str, info: os.stat_result) -> FileInfo:
    # Some network file systems use all 64 bits, SQLite's integers have a sign.
    inode = info.st_ino & _INODE_MASK
    return FileInfo(
        name,
        info.st_size,
        info.st_mtime_ns,
        inode,
        is_directory=stat_module.S_ISDIR(info.st_mode),
        is_link=stat_module.S_ISLNK(info.st_mode),
        mode=stat_module.S_IMODE(info.st_mode),
        owner_id=info.st_uid,
    )


def _batch(pending: Sequence[memoryview]) -> list[memoryview]:
    """Return the leading buffers that fit one vectored call, the last one perhaps cut."""
    batch = []
    room_bytes = _CALL_LIMIT_BYTES
    for view in islice(pending, _IOV_LIMIT):
        batch.append(view[:room_bytes])
        room_bytes -= batch[-1].nbytes
        if room_bytes == 0:
            break
    return batch


def _advance(pending: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return what is left of `pending` after `done_bytes` of it were transferred."""
    index = 0
    while index < len(pending) and done_bytes >= pending[index].nbytes:
        done_bytes -= pending[index].nbytes
        index += 1
    rest = pending[index:]
    if done_bytes:
        rest[0] = rest[0][done_bytes:]
    return rest
