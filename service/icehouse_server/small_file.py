"""Small files: files that settings name, read as a whole, within a size limit and without ever blocking.

By the time a path is read, it may lead to anything: a pipe that nobody writes to, a device, an endless file.
Links are followed, since volumes of secrets consist of them.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path

SMALL_FILE_LIMIT_BYTES = 1 << 20
"""Limit for files that people write: certificates, tokens, settings."""

MODEL_FILE_LIMIT_BYTES = 256 << 20
"""Limit for a model's files other than weights: vocabularies of some 30 MB are common."""


@dataclasses.dataclass(frozen=True, slots=True)
class SmallFile:
    """A file's content, and who else may read or write it."""

    content: bytes = dataclasses.field(repr=False)
    mode: int
    """Permission bits."""


def read_small_file(path: Path, *, limit_bytes: int = SMALL_FILE_LIMIT_BYTES) -> SmallFile:
    """Return the content of a regular file.

    Raises `OSError`, whose `strerror` says what is wrong, for anything else and for a file of more than
    `limit_bytes`.
    """
    # Check before opening: opening a device may have side effects.
    _check_plain(path, os.stat(path))
    # O_NONBLOCK: if it has become a pipe by now, we must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        _check_plain(path, info)
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
    return SmallFile(content, stat.S_IMODE(info.st_mode))


def _check_plain(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
