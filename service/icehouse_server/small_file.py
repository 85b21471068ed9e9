"""Small files: those that settings name, read whole, within a bound, and without waiting for anybody.

A path may lead to anything by the time it is read: a pipe that nobody writes to, a device, a file
without an end. Links are followed, since volumes of secrets are made of them.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path

SMALL_FILE_LIMIT_BYTES = 1 << 20
"""For what people write: certificates, tokens, settings."""

MODEL_FILE_LIMIT_BYTES = 256 << 20
"""For what a model's folder holds beside its weights: vocabularies of some 30 MB are common."""


@dataclasses.dataclass(frozen=True, slots=True)
class SmallFile:
    """What was in a file, and who else may read or write it."""

    content: bytes = dataclasses.field(repr=False)
    mode: int
    """Permission bits."""


def read_small_file(path: Path, *, limit_bytes: int = SMALL_FILE_LIMIT_BYTES) -> SmallFile:
    """Return what is in a plain file.

    Raises `OSError`, whose `strerror` says what is wrong, for anything else and for more than
    `limit_bytes`.
    """
    # Looked at first: opening a device may do something.
    _check_plain(path, os.stat(path))
    # O_NONBLOCK: what has become a pipe by now must not have us wait for its writer.
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
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
