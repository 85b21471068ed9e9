"""File systems that fail once, or stop the world after a step."""

from __future__ import annotations

import os
from collections import Counter

from icehouse_server.storage.files import SystemFiles

VERBS = (
    "make_dir",
    "create",
    "write",
    "fsync",
    "close",
    "rename",
    "fsync_dir",
    "unlink",
    "list",
    "stat",
    "open",
    "read_into",
    "size",
    "free_bytes",
)


class FaultyFiles:
    """Fails the n-th call of one verb with one errno; everything else is the system's."""

    def __init__(self, verb: str, call_number: int, error_number: int, *, times: int = 1) -> None:
        self.calls: Counter[str] = Counter()
        self.failed_count = 0
        self.is_armed = False
        self._verb, self._first, self._errno, self._times = verb, call_number, error_number, times
        self._system = SystemFiles()

    def __getattr__(self, verb: str):
        action = getattr(self._system, verb)

        def call(*args, **kwargs):
            if self.is_armed and verb == self._verb:
                self.calls[verb] += 1
                if self._first <= self.calls[verb] < self._first + self._times:
                    self.failed_count += 1
                    if verb == "close":
                        # A close that fails has closed all the same.
                        action(*args, **kwargs)
                    raise OSError(self._errno, os.strerror(self._errno), f"injected into {verb}")
            return action(*args, **kwargs)

        return call


class Crash(BaseException):
    """The power went. Not an Exception, so that nothing handles it."""


class CrashingFiles:
    """Crashes after the n-th step, and then loses what was never made durable.

    A file that was written but not fsynced loses its second half; a rename that was not
    followed by a sync of its directory is undone, and what it replaced is there again.
    """

    def __init__(self, crash_at: int) -> None:
        self.step_count = 0
        self.is_armed = False
        self._crash_at = crash_at
        self._system = SystemFiles()
        self._open_paths: dict[int, str] = {}
        self._unsynced: set[str] = set()
        self._renames: list[tuple[str, str]] = []
        self._replaced: dict[str, bytes] = {}
        self.has_crashed = False

    def __getattr__(self, verb: str):
        action = getattr(self._system, verb)

        def call(*args, **kwargs):
            if self.has_crashed:
                # Clean-up code runs in this simulation only; a dead process does nothing more.
                raise Crash
            if verb == "rename" and os.path.isfile(args[1]):
                with open(args[1], "rb") as replaced:
                    self._replaced[args[1]] = replaced.read()
            result = action(*args, **kwargs)
            self._note(verb, args, result)
            self.step()
            return result

        return call

    def step(self) -> None:
        """Count a step and crash when it is the one. The manifest's steps are counted here too."""
        if self.is_armed:
            self.step_count += 1
            if self.step_count == self._crash_at:
                self.has_crashed = True
                self._lose_what_is_not_durable()
                # The system closes what a dead process had open, and so drops its lock.
                for descriptor in self._open_paths:
                    os.close(descriptor)
                raise Crash

    def _note(self, verb: str, args: tuple, result: object) -> None:
        if verb in ("create", "open", "lock"):
            assert isinstance(result, int)
            self._open_paths[result] = args[0]
        if verb == "create":
            self._unsynced.add(args[0])
        elif verb == "close":
            del self._open_paths[args[0]]
        elif verb == "fsync":
            self._unsynced.discard(self._open_paths[args[0]])
        elif verb == "rename":
            self._renames.append((args[0], args[1]))
            if args[0] in self._unsynced:
                self._unsynced.remove(args[0])
                self._unsynced.add(args[1])
        elif verb == "fsync_dir":
            self._renames = [pair for pair in self._renames if os.path.dirname(pair[1]) != args[0]]

    def _lose_what_is_not_durable(self) -> None:
        for path in self._unsynced:
            if os.path.exists(path):
                os.truncate(path, os.path.getsize(path) // 2)
        for source, target in reversed(self._renames):
            if os.path.exists(target):
                os.rename(target, source)
            if target in self._replaced:
                with open(target, "wb") as again:
                    again.write(self._replaced[target])
