"""Archive files: where an export of cached blocks goes, and where an import comes from.

An archive holds prompts' token ids, so its file is readable only by its owner. It has its name when it is
complete; until then, and where the call fails, there is a file with `.partial` behind its name, or none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from icehouse.v1 import cache_service_pb2 as messages

CHUNK_BYTES = 1 << 20
"""The longest part of an archive in one message."""

ArchiveFile = str | os.PathLike[str] | BinaryIO
"""A path, or a file that is open for bytes and stays open."""


@contextlib.contextmanager
def written(file: ArchiveFile) -> Iterator[Callable[[bytes], object]]:
    """Yield what writes to an archive's file. Raises OSError."""
    if not isinstance(file, str | os.PathLike):
        yield file.write
        file.flush()
        return
    path = os.fspath(file)
    partial = f"{path}.partial"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream.write
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise


@contextlib.contextmanager
def opened(file: ArchiveFile) -> Iterator[BinaryIO]:
    """Yield an archive's file, open for reading. Raises OSError."""
    if not isinstance(file, str | os.PathLike):
        yield file
        return
    with open(file, "rb") as stream:
        yield stream


def import_requests(target: messages.ImportTarget, source: BinaryIO) -> Iterator[messages.ImportRequest]:
    """Yield the messages of an import."""
    yield messages.ImportRequest(target=target)
    while chunk := source.read(CHUNK_BYTES):
        yield messages.ImportRequest(chunk=chunk)
