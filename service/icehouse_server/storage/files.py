"""Files: the few file system operations that the SSD tier uses.

Every file that the cache writes goes through a `Files`, so that a test can make each operation fail
once, or stop the process after it. SQLite does its own I/O.
Every method raises `OSError` with the operating system's errno; none of them logs or retries.

Below a guarded root every folder of a path is opened separately and checked, each time. So a
link planted there is never followed, however late it appears.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import stat as stat_module
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from icehouse_server.storage.store_paths import PARTIAL_SUFFIX

_log = logging.getLogger(__name__)

Buffer = bytes | memoryview
Result = TypeVar("Result")

TIME_LIMIT_S = 5.0
"""Limit for what a start does on a disk before there is a storage thread."""

_NOT_SUPPORTED = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})

_IOV_LIMIT = 1024
"""Most buffers of one vectored call: IOV_MAX of Linux and macOS. Callers pass a few MiB per call, far below
the 2 GiB that macOS refuses."""

_INODE_MASK = (1 << 63) - 1

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_OTHERS_WRITE = 0o002
"""Others, not the group: a container's volume often belongs to its group."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True, slots=True)
class FileInfo:
    """What a directory entry says about itself. A symbolic link is not followed."""

    name: str
    size_bytes: int
    mtime_ns: int
    """In ticks of the system's clock, often some milliseconds: two files may share a time."""
    inode: int
    """A rename keeps it, so it tells two swapped files apart."""
    is_directory: bool
    is_link: bool
    is_file: bool
    """Whether it is a plain file: no folder, link, pipe, socket or device."""
    mode: int
    """Permission bits."""
    owner_id: int
    name_count: int
    """Hard links: how many names this file has, here and elsewhere."""


class Files:
    """The cache's operations on a disk. Paths are absolute; descriptors are the system's."""

    def __init__(self) -> None:
        self._can_flush_drive = True
        self._roots: dict[str, str] = {}
        """Guarded roots, each with the real path it had when it was guarded."""

    def guard(self, root: str) -> None:
        """From now on follow no link below `root`, and use no folder or file there that is not ours.

        The root itself may be a link: its target at this moment is what counts.
        """
        self._roots[root] = os.path.realpath(root)

    def make_dir(self, path: str) -> None:
        """Create a directory, mode 0700, and its missing parents; an existing one is fine."""
        # os.makedirs would apply its mode only to the last folder.
        parent = os.path.dirname(path)
        if self._root_of(parent) is None and not os.path.isdir(parent):
            self.make_dir(parent)
        with contextlib.suppress(FileExistsError), self._folder_of(path) as (folder, name):
            os.mkdir(name, mode=DIRECTORY_MODE, dir_fd=folder)

    def create(self, path: str) -> int:
        """Create a file that must not exist, mode 0600, and open it for writing."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        with self._folder_of(path) as (folder, name):
            return os.open(name, flags, FILE_MODE, dir_fd=folder)

    def write(self, descriptor: int, parts: Sequence[Buffer], *, offset: int) -> None:
        """Write all parts in order from `offset`. A short write is continued."""
        if _transfer(os.pwritev, descriptor, parts, offset) < sum(memoryview(part).nbytes for part in parts):
            raise OSError(errno.EIO, "The system wrote 0 bytes and named no reason")

    def fsync(self, descriptor: int) -> None:
        """Return once the file's bytes are on the medium."""
        if self._can_flush_drive and hasattr(fcntl, "F_FULLFSYNC"):
            # On macOS fsync() leaves the bytes in the drive's own cache.
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
                # Network and some foreign file systems lack this call; SQLite falls back to fsync there too.
                self._can_flush_drive = False
                _log.warning("drive_cache_not_flushed", extra={"detail": str(error)})
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor; it is gone even when this raises."""
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give a file its new name in one step, replacing any file of that name."""
        with self._folder_of(source) as (old_folder, old_name), self._folder_of(target) as (folder, name):
            os.rename(old_name, name, src_dir_fd=old_folder, dst_dir_fd=folder)

    def fsync_dir(self, path: str) -> None:
        """Return once the names in a directory are on the medium."""
        with self._opened_folder(path) as descriptor:
            os.fsync(descriptor)

    def unlink(self, path: str) -> None:
        with self._folder_of(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def list(self, path: str) -> list[FileInfo]:
        """Return the entries of a directory, in any order."""
        infos = []
        with self._opened_folder(path) as folder, os.scandir(folder) as entries:
            for entry in entries:
                # The entry may have been renamed or removed since.
                with contextlib.suppress(FileNotFoundError):
                    infos.append(_info(entry.name, entry.stat(follow_symlinks=False)))
        return infos

    def stat(self, path: str) -> FileInfo:
        with self._folder_of(path) as (folder, name):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return _info(os.path.basename(path), info)

    def stat_all(self, folder: str, names: Sequence[str]) -> dict[str, FileInfo]:
        """Return the entries of a folder with these names; missing ones are left out."""
        # A guarded folder is opened step by step, which costs twenty times as much as one stat in it.
        infos = {}
        with contextlib.suppress(FileNotFoundError), self._opened_folder(folder) as descriptor:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    infos[name] = _info(name, os.stat(name, dir_fd=descriptor, follow_symlinks=False))
        return infos

    def open(self, path: str) -> int:
        # O_NOFOLLOW: a link planted in the directory must not make us read another file. O_NONBLOCK: a pipe
        # must not make us wait for its writer; for plain files it has no effect.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._folder_of(path) as (folder, name):
            descriptor = os.open(name, flags, dir_fd=folder)
        try:
            info = _info(name, os.fstat(descriptor))
            if folder is not None:
                # It is only read, so a second name does no harm.
                _refuse_foreign(info, may_have_links=True)
            elif not info.is_file:
                raise OSError(errno.EINVAL, "It is not a plain file", path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read_into(self, descriptor: int, parts: Sequence[memoryview], *, offset: int) -> int:
        """Fill the parts in order from `offset` and return the bytes read; fewer only at the end of file."""
        return _transfer(os.preadv, descriptor, parts, offset)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def free_bytes(self, path: str) -> int:
        """Return the bytes an unprivileged process may still write beside `path`."""
        with self._opened_folder(path) as descriptor:
            info = os.fstatvfs(descriptor)
        return info.f_bavail * info.f_frsize

    def lock(self, path: str, *, owner: str) -> int:
        """Take the exclusive lock file and write `owner` into it; raises BlockingIOError if it is held."""
        # Nothing is written before we know that the file is ours: a symbolic or hard link planted here must
        # not make us write into another file.
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._folder_of(path) as (folder, name):
            descriptor = os.open(name, flags, FILE_MODE, dir_fd=folder)
        try:
            _refuse_foreign(_info(name, os.fstat(descriptor)))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_at(self, descriptor: int, path: str) -> bool:
        """Return whether an open file is still the one with this name."""
        try:
            with self._folder_of(path) as (folder, name):
                there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(descriptor), there)

    def _root_of(self, path: str) -> str | None:
        """Return the guarded root that is `path` or contains it."""
        return next((root for root in self._roots if path == root or path.startswith(root + "/")), None)

    @contextlib.contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int | None, str]]:
        """Yield the open folder of a path and the name in it; no folder if the path is not guarded."""
        folder, _, name = path.rpartition("/")
        if self._root_of(folder) is None:
            yield None, path
            return
        with self._opened_folder(folder) as descriptor:
            yield descriptor, name

    @contextlib.contextmanager
    def _opened_folder(self, path: str) -> Iterator[int]:
        """Yield an open folder; below a guarded root each folder on the way is opened and checked."""
        root = self._root_of(path)
        descriptor = os.open(path if root is None else self._roots[root], _FOLDER_FLAGS)
        try:
            if root is not None:
                _refuse_foreign(_info(root, os.fstat(descriptor)))
            for name in path[len(root) :].split("/")[1:] if root is not None else ():
                inner = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
                _refuse_foreign(_info(name, os.fstat(descriptor)))
            yield descriptor
        finally:
            os.close(descriptor)


def distrust(info: FileInfo, *, is_folder: bool, may_have_links: bool = False) -> str:
    """Return what makes a folder or file untrustworthy; "" if nobody else can change it.

    `may_have_links`: a file that is only read may have other hard links.
    """
    if info.is_link:
        return "is a link, which could point to any file; remove it"
    if not (info.is_directory if is_folder else info.is_file):
        return f"is not a {'folder' if is_folder else 'plain file'}; remove it"
    if info.owner_id not in (0, os.geteuid()):
        return f"belongs to user {info.owner_id}, who could change it; run chown on it"
    if info.mode & _OTHERS_WRITE:
        return f"has mode {info.mode:04o}, so others may write it; run chmod go-w on it"
    if not is_folder and not may_have_links and info.name_count > 1:
        return "is a hard link, so the file's other names would change too; remove it"
    return ""


def _refuse_foreign(info: FileInfo, *, may_have_links: bool = False) -> None:
    problem = distrust(info, is_folder=info.is_directory, may_have_links=may_have_links)
    if problem:
        raise PermissionError(errno.EPERM, f"It {problem}", info.name)


@contextlib.contextmanager
def opened(files: Files, path: str) -> Iterator[int]:
    """Open a file for reading, and close it at the end."""
    descriptor = files.open(path)
    try:
        yield descriptor
    finally:
        files.close(descriptor)


def remove(files: Files, path: str) -> None:
    """Remove a file; one that is gone already is fine."""
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path)


def size_at(files: Files, path: str) -> int | None:
    """Return the size in bytes of the file of this name, or None."""
    try:
        return files.stat(path).size_bytes
    except FileNotFoundError:
        return None


def exists(files: Files, path: str) -> bool:
    """Return whether anything has this name."""
    return size_at(files, path) is not None


def write_anew(files: Files, path: str, data: bytes, *, is_durable: bool = False) -> None:
    """Write a file after removing any of this name; if `is_durable`, durable once the folder is synced."""
    remove(files, path)
    descriptor = files.create(path)
    try:
        files.write(descriptor, [data], offset=0)
        if is_durable:
            files.fsync(descriptor)
    finally:
        files.close(descriptor)


def replace_file(files: Files, path: str, data: bytes) -> None:
    """Replace a file in one step; durable once the folder is synced."""
    partial = path + PARTIAL_SUFFIX
    write_anew(files, partial, data, is_durable=True)
    files.rename(partial, path)


def read_text(files: Files, path: str, *, limit_bytes: int) -> str:
    """Return the beginning of a small text file; bytes that are not UTF-8 are replaced."""
    buffer = bytearray(limit_bytes)
    with opened(files, path) as descriptor:
        got = files.read_into(descriptor, [memoryview(buffer)], offset=0)
    return buffer[:got].decode("utf-8", errors="replace")


def in_time(action: Callable[[], Result]) -> Result:
    """Do something on a disk that may hang; return or raise what `action` does, or `TimeoutError`.

    Nothing can end a thread that waits for a disk: it continues, and its result is dropped.
    """
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(action())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="disk-action", daemon=True).start()
    try:
        return ended.result(TIME_LIMIT_S)
    except TimeoutError as error:
        if ended.done():
            raise
        raise TimeoutError(f"the disk did not answer within {TIME_LIMIT_S:g} s") from error


def _info(name: str, info: os.stat_result) -> FileInfo:
    # Some network file systems use all 64 bits; SQLite's integers are signed.
    inode = info.st_ino & _INODE_MASK
    return FileInfo(
        name,
        info.st_size,
        info.st_mtime_ns,
        inode,
        is_directory=stat_module.S_ISDIR(info.st_mode),
        is_link=stat_module.S_ISLNK(info.st_mode),
        is_file=stat_module.S_ISREG(info.st_mode),
        mode=stat_module.S_IMODE(info.st_mode),
        owner_id=info.st_uid,
        name_count=info.st_nlink,
    )


def _transfer(call: Callable[..., int], descriptor: int, parts: Sequence[Any], offset: int) -> int:
    """Read or write parts in order from `offset` until the system moves no more; return the bytes moved."""
    pending = [view for part in parts if (view := memoryview(part)).nbytes]
    done_bytes = 0
    while pending and (moved_bytes := call(descriptor, pending[:_IOV_LIMIT], offset + done_bytes)):
        done_bytes += moved_bytes
        pending = _advance(pending, moved_bytes)
    return done_bytes


def _advance(pending: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return what remains of `pending` after `done_bytes` of it were transferred."""
    index = 0
    while index < len(pending) and done_bytes >= pending[index].nbytes:
        done_bytes -= pending[index].nbytes
        index += 1
    rest = pending[index:]
    if done_bytes:
        rest[0] = rest[0][done_bytes:]
    return rest
