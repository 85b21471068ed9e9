"""Disk errors by kind: every decision about an error of the disk or of SQLite starts here.

Full: eviction helps. Foreign or damaged: the manifest cannot be used, and is rebuilt from the
files. Refused: only a later retry helps.
"""

from __future__ import annotations

import enum
import errno
import sqlite3

from icehouse_server.errors import Reason, StartError

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_SHORTAGE_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_FOREIGN_CODES = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_SCHEMA,
        sqlite3.SQLITE_MISMATCH,
        # Values longer, and statements slower, than any of ours.
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_INTERRUPT,
    }
)
_DAMAGED_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})


class DiskErrorKind(enum.Enum):
    """What can be done about an error."""

    FULL = enum.auto()
    FOREIGN = enum.auto()
    """The database is intact, but its tables are not those of this version."""
    DAMAGED = enum.auto()
    REFUSED = enum.auto()
    """An I/O error, a lock held by others, missing permission, a missing file."""


class ForeignManifest(sqlite3.DatabaseError):
    """The manifest's tables are not those of this version."""


class LaterManifest(ForeignManifest):
    """The manifest was written by a later version."""


def classify(error: Exception) -> DiskErrorKind:
    """Return the kind of an error of the disk or of SQLite."""
    if isinstance(error, ForeignManifest):
        return DiskErrorKind.FOREIGN
    if isinstance(error, sqlite3.Error):
        # An extended code has the plain one in its lowest byte.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return DiskErrorKind.FULL
        if code in _FOREIGN_CODES:
            return DiskErrorKind.FOREIGN
        return DiskErrorKind.DAMAGED if code in _DAMAGED_CODES else DiskErrorKind.REFUSED
    is_full = isinstance(error, OSError) and error.errno in _FULL_ERRNOS
    return DiskErrorKind.FULL if is_full else DiskErrorKind.REFUSED


def is_shortage(error: OSError) -> bool:
    """Return whether the process lacks descriptors or memory, which says nothing about the file."""
    return error.errno in _SHORTAGE_ERRNOS


def outline(error: OSError | sqlite3.Error | StartError) -> str:
    """Return what went wrong, without the file names that the error's own text may contain."""
    if isinstance(error, StartError):
        is_owned = error.reason is Reason.STORE_LOCKED
        return "it is in use by another process" if is_owned else "it cannot be used"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    name = getattr(error, "sqlite_errorname", "")
    return f"the manifest answers {name}" if name else "the manifest cannot be used"
