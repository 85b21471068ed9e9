"""Digests of weight files: SHA-256 over every byte, kept for as long as a file is what it was.

What a file system says of a file (inode, size, times of its content and of its inode) stands for its
bytes only while all of it is the same: writing into a file changes the last of these, which nobody can
set back. So weights are read once, when they are new, and a start after that looks at four numbers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from icehouse_server.clock import Clock
from icehouse_server.storage.files import Files, opened, read_text, write_anew
from icehouse_server.storage.paths import PARTIAL_SUFFIX, StorePaths
from icehouse_server.storage.time_limit import in_time

_log = logging.getLogger(__name__)

_FORMAT = "icehouse.digests.v1"
_FILE_LIMIT_BYTES = 4 << 20
_ENTRY_LIMIT = 4096
"""Files remembered; the ones asked for longest ago go first."""
_PIECE_BYTES = 64 << 20
"""Hashed by itself, so that several cores hash one file: the digest is that of the pieces' digests."""
_READ_BYTES = 4 << 20
_THREAD_LIMIT = 8
_SETTLED_S = 2.0
"""A file changed so lately may change again within the same tick of the file system's clock."""

_Stamp = tuple[int, int, int, int]
"""Inode, size, and the times of content and of inode. Not the device: its number changes with mounts."""


class DigestBook:
    """What is known of weight files, in one small file of the cache directory. Used at the start only."""

    def __init__(self, directory: str, *, files: Files, clock: Clock) -> None:
        self._paths = StorePaths(os.path.abspath(directory))
        self._files = files
        self._clock = clock
        self._digests: dict[_Stamp, str] = {}
        self._is_changed = False
        self.read_bytes = 0
        """Read of weight files since this book was opened."""
        self._load()

    def digest(self, path: str) -> str:
        """Return the digest of all bytes of a file, read only when it is not known. Raises `OSError`."""
        began_time = self._clock.wall()
        stamp = _stamp(path)
        known = self._digests.pop(stamp, None)
        if known is None:
            known = self._read(os.path.realpath(path), stamp[1])
            is_settled = max(stamp[2], stamp[3]) / 1e9 + _SETTLED_S < began_time
            if not is_settled or _stamp(path) != stamp:
                return known
            self._is_changed = True
        self._digests[stamp] = known
        return known

    def save(self) -> None:
        """Write what was learned; a disk that refuses costs the next start the same reading again."""
        if not self._is_changed:
            return
        kept = list(self._digests.items())[-_ENTRY_LIMIT:]
        text = json.dumps(
            {
                "format": _FORMAT,
                "files": [[*stamp, digest] for stamp, digest in kept],
            }
        )
        try:
            in_time(lambda: self._replace(text.encode()))
        except OSError as error:
            _log.warning("digests_not_kept", extra={"detail": str(error)})
        else:
            self._is_changed = False

    def _replace(self, text: bytes) -> None:
        partial = self._paths.digests + PARTIAL_SUFFIX
        self._files.make_dir(self._paths.root)
        write_anew(self._files, partial, text, is_durable=True)
        self._files.rename(partial, self._paths.digests)

    def _load(self) -> None:
        try:
            text = in_time(lambda: read_text(self._files, self._paths.digests, limit_bytes=_FILE_LIMIT_BYTES))
            document = json.loads(text)
            if document["format"] != _FORMAT:
                return
            self._digests = {
                (int(item[0]), int(item[1]), int(item[2]), int(item[3])): str(item[4])
                for item in document["files"]
            }
        except FileNotFoundError:
            return
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # It only saves reading; without it everything is read once more.
            _log.warning("digests_not_read", extra={"detail": str(error)})

    def _read(self, path: str, size_bytes: int) -> str:
        """Hash a file, a piece on each core."""
        with opened(self._files, path) as descriptor:
            starts = range(0, size_bytes, _PIECE_BYTES)
            workers = max(1, min(_THREAD_LIMIT, os.cpu_count() or 1, len(starts)))
            with ThreadPoolExecutor(workers, thread_name_prefix="weight-digest") as pool:
                pieces = list(
                    pool.map(
                        lambda start: self._read_piece(
                            descriptor, start, min(start + _PIECE_BYTES, size_bytes)
                        ),
                        starts,
                    )
                )
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
