"""Service managers: what the commands ask of systemd and of launchd, and how their programs are run."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from icehouse_server.cli.service.definition import ServiceDefinition, ServiceError

_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What a manager says of the service."""

    is_running: bool
    facts: dict[str, str]
    """Its words, by its names: state, process, how often it was started again."""


class Manager(Protocol):
    """One of the two, for the service of this user."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def path(self) -> Path:
        """Where it looks for the service's file."""
        ...

    @property
    def hints(self) -> tuple[str, ...]:
        """What somebody who has just installed the service should know."""
        ...

    def text_of(self, definition: ServiceDefinition) -> str:
        """Return the file; raises ServiceError for what cannot be said in it."""
        ...

    def start(self) -> None:
        """Take up the file and run the service, now and from every login on."""
        ...

    def stop(self, *, timeout_s: float) -> None:
        """End the service in order, and start it no more."""
        ...

    def forget(self) -> None:
        """Notice that the file is gone."""
        ...

    def status(self) -> ServiceStatus:
        """Ask how the service does."""
        ...


def answer_of(command: Sequence[str], *, timeout_s: float = _TIMEOUT_S) -> str:
    """Return what a manager's program prints; raises ServiceError with its own words when it fails."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise ServiceError(f"there is no {command[0]} here; --print shows the file") from error
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"`{shown}` did not end within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise ServiceError(f"`{shown}` ended with {done.returncode}: {said}")
    return done.stdout
