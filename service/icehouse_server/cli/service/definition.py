"""Service definition: what a service manager is to run, and the file that says so under a seal.

The seal is a checksum in the file over all the rest of it: a file that somebody has changed by hand is told
from one that an earlier version wrote, and is left alone unless that is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

OPEN_SEAL = "0" * 64
"""Where the checksum goes."""

SEAL_LINE = f"Written by `icehouse service install`, sha256:{OPEN_SEAL}. One that was changed is left alone."

_SEAL = re.compile(r"(?<=sha256:)[0-9a-f]{64}")


class ServiceError(Exception):
    """What keeps a command from being done, for people, with what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """What is run, whatever runs it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of the service. No secret: every user of the machine may be able to read the file."""
    stop_timeout_s: int
    """How long an orderly stop may take."""


class FileState(enum.StrEnum):
    """How a definition's file stands to what would be written."""

    ABSENT = "absent"
    SAME = "same"
    OLDER = "older"
    """Written by `install`, with other settings or by another version, and not changed since."""
    CHANGED = "changed"
    """Somebody changed or wrote it by hand."""


def sealed(text: str) -> str:
    """Return a definition's text with its checksum filled in."""
    assert text.count(OPEN_SEAL) == 1, "a definition has one seal"
    return text.replace(OPEN_SEAL, hashlib.sha256(text.encode()).hexdigest())


def is_untouched(text: str) -> bool:
    """Whether a file is as `sealed` made it."""
    found = _SEAL.findall(text)
    return len(found) == 1 and sealed(_SEAL.sub(OPEN_SEAL, text)) == text


@dataclasses.dataclass(frozen=True, slots=True)
class DefinitionFile:
    """The one file that makes a service known to its manager."""

    path: Path

    def state(self, wanted: str | None = None) -> FileState:
        """Return how the file stands to the text `wanted`; without one, whether it may go."""
        if not os.path.lexists(self.path):
            return FileState.ABSENT
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ServiceError(f"cannot read {self.path}: {error.strerror}") from error
        except UnicodeDecodeError:
            return FileState.CHANGED
        if text == wanted:
            return FileState.SAME
        # A link leads to somebody's own file, or to nothing, which is how systemd masks a unit.
        is_ours = is_untouched(text) and not self.path.is_symlink()
        return FileState.OLDER if is_ours else FileState.CHANGED

    def write(self, text: str, *, is_forced: bool) -> None:
        """Put `text` there, whole or not at all; raises ServiceError where a changed file would be lost."""
        self._guard(self.state(text), is_forced=is_forced, verb="replaces")
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            draft.chmod(0o644)
            draft.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise ServiceError(f"cannot write {self.path}: {error.strerror}") from error

    def guard_removal(self, *, is_forced: bool) -> None:
        """Raise ServiceError where there is no file, or a changed one that nobody said may go."""
        state = self.state()
        if state is FileState.ABSENT:
            raise ServiceError(f"no service is installed: there is no {self.path}")
        self._guard(state, is_forced=is_forced, verb="removes")

    def remove(self) -> None:
        """Remove the file; raises ServiceError where it cannot be."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise ServiceError(f"cannot remove {self.path}: {error.strerror}") from error

    def _guard(self, state: FileState, *, is_forced: bool, verb: str) -> None:
        if state is FileState.CHANGED and not is_forced:
            raise ServiceError(
                f"{self.path} is not as `service install` wrote it; look at it, then --force {verb} it"
            )
