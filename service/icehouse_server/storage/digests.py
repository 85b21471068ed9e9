"""Digests of weight files: SHA-256 over every byte, remembered for as long as a file does not change.

Every write to a file changes the time of its inode, which nobody can set back. So weights are read once,
when they are new, and later starts compare four numbers: inode, size, and the times of content and inode.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from icehouse_server.clock import Clock
from icehouse_server.storage.files import Files, in_time, opened, read_text, replace_file
from icehouse_server.storage.store_paths import StorePaths

_log = logging.getLogger(__name__)

_FORMAT = "icehouse.digests.v1"
_FILE_LIMIT_BYTES = 4 << 20
_ENTRY_LIMIT = 4096
"""Files remembered; the least recently requested are forgotten first."""
_PIECE_BYTES = 64 << 20
"""Pieces are hashed separately, on several cores; the file's digest is that of the pieces' digests."""
_READ_BYTES = 4 << 20
_THREAD_LIMIT = 8
_MIN_AGE_S = 2.0
"""A file changed more recently may change again within the same tick of the file system's clock."""

_Stamp = tuple[int, int, int, int]
"""Inode, size, and the times of content and inode. Not the device: its number changes with mounts."""


class DigestBook:
    """Known digests, in one small file of the cache directory. Used at the start only."""

    def __init__(self, directory: str, *, files: Files, clock: Clock) -> None:
        self._paths = StorePaths(os.path.abspath(directory))
        self._files = files
        self._clock = clock
        self._digests: dict[_Stamp, str] = {}
        self._is_changed = False
        self.read_bytes = 0
        """Bytes of weight files read since this book was opened."""
        self._load()

    def digest(self, path: str) -> str:
        """Return the digest of all bytes of a file, read only if it is not known yet. Raises `OSError`."""
        began_time = self._clock.wall()
        stamp = _stamp(path)
        known = self._digests.pop(stamp, None)
        if known is None:
            known = self._read(os.path.realpath(path), stamp[1])
            is_old_enough = max(stamp[2], stamp[3]) / 1e9 + _MIN_AGE_S < began_time
            if not is_old_enough or _stamp(path) != stamp:
                return known
            self._is_changed = True
        self._digests[stamp] = known
        return known

    def save(self) -> None:
        """Write new digests; if the disk refuses, the next start reads the files again."""
        if not self._is_changed:
            return
        latest = list(self._digests.items())[-_ENTRY_LIMIT:]
        text = json.dumps({"format": _FORMAT, "files": [[*stamp, digest] for stamp, digest in latest]})
        try:
            in_time(lambda: self._replace(text.encode()))
        except OSError as error:
            _log.warning("digests_not_kept", extra={"detail": str(error)})
        else:
            self._is_changed = False

    def _replace(self, text: bytes) -> None:
        self._files.make_dir(self._paths.root)
        replace_file(self._files, self._paths.digests, text)

    def _load(self) -> None:
        try:
            text = in_time(lambda: read_text(self._files, self._paths.digests, limit_bytes=_FILE_LIMIT_BYTES))
            document = json.loads(text)
            if document["format"] != _FORMAT:
                return
            self._digests = {
                (int(inode), int(size_bytes), int(mtime_ns), int(ctime_ns)): str(digest)
                for inode, size_bytes, mtime_ns, ctime_ns, digest, *_ in document["files"]
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            # Without the book every file is read once more.
            _log.warning("digests_not_read", extra={"detail": str(error)})

    def _read(self, path: str, size_bytes: int) -> str:
        """Hash a file, a piece on each core."""
        starts = range(0, size_bytes, _PIECE_BYTES)
        stops = (min(start + _PIECE_BYTES, size_bytes) for start in starts)
        worker_count = max(1, min(_THREAD_LIMIT, os.cpu_count() or 1, len(starts)))
        with (
            opened(self._files, path) as descriptor,
            ThreadPoolExecutor(worker_count, thread_name_prefix="weight-digest") as pool,
        ):
            pieces = list(pool.map(functools.partial(self._read_piece, descriptor), starts, stops))
        self.read_bytes += size_bytes
        return hashlib.sha256(size_bytes.to_bytes(8, "little") + b"".join(pieces)).hexdigest()

    def _read_piece(self, descriptor: int, start: int, stop: int) -> bytes:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
        while start < stop:
            got = self._files.read_into(descriptor, [buffer[: stop - start]], offset=start)
            if not got:
                raise OSError(f"A weight file ended at byte {start}, before byte {stop}")
            digest.update(buffer[:got])
            start += got
        return digest.digest()


def _stamp(path: str) -> _Stamp:
    info = os.stat(path)
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
