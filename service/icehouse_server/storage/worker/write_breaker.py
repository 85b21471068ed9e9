"""Write breaker: whether the disk may be written, and when to try again after it refused."""

from __future__ import annotations

import errno
import sqlite3

from icehouse_server.errors import Reason, StartError

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


class WriteBreaker:
    """Open, or shut with a reason. Times are `Clock.monotonic`."""

    def __init__(self) -> None:
        self.detail = ""
        self.needed_bytes = 0
        """Free space that opens the gate again; 0 when it was not shut for want of space."""
        self._retry_time = 0.0
        self._retry_s = _FIRST_RETRY_S

    @property
    def is_open(self) -> bool:
        """Whether writing is allowed."""
        return not self.detail

    def shut(self, detail: str, *, now: float, needed_bytes: int = 0) -> None:
        """Stop writing; every further failure doubles the wait up to a minute."""
        self.detail = detail
        self.needed_bytes = needed_bytes
        self._retry_time = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def open(self) -> None:
        """Allow writing again."""
        self.detail = ""
        self.needed_bytes = 0

    def wrote(self) -> None:
        """Note a success: the next failure is a new one."""
        self._retry_s = _FIRST_RETRY_S

    def is_retry_due(self, *, now: float) -> bool:
        """Whether it is time to look whether the disk has recovered."""
        return not self.is_open and now >= self._retry_time


def is_disk_full(error: Exception) -> bool:
    """Say whether an error means that there is no space, and not that something is broken."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in _FULL_ERRNOS


def outline(error: OSError | sqlite3.Error | StartError) -> str:
    """Say what went wrong without the names of files, which an error's own words may hold."""
    if isinstance(error, StartError):
        is_owned = error.reason is Reason.STORE_LOCKED
        return "it is in use by another process" if is_owned else "it cannot be used"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    name = getattr(error, "sqlite_errorname", "")
    return f"the manifest answers {name}" if name else "the manifest cannot be used"
