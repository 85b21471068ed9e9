"""Service managers: systemd and launchd, the file that each reads, and how their programs are run.

The file contains a checksum over the rest of it. So a file that somebody edited is recognised and left alone,
unless the user says otherwise.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.resources
import os
import plistlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

OPEN_SEAL = "0" * 64
"""Where the checksum goes."""

SEAL_LINE = f"Written by `icehouse service install`, sha256:{OPEN_SEAL}. One that was changed is left alone."

_SEAL = re.compile(r"(?<=sha256:)[0-9a-f]{64}")


class ServiceError(Exception):
    """Why a command cannot be done, and what to do, for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """What is run, whichever manager runs it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables of the service. No secrets: every user of the machine may be able to read the file."""
    stop_timeout_s: int
    """How long a clean stop may take."""


class ServiceFileState(enum.StrEnum):
    """How a definition's file compares to what would be written."""

    ABSENT = "absent"
    SAME = "same"
    OLDER = "older"
    """Written by `install`, with other settings or by another version, and not edited since."""
    CHANGED = "changed"
    """Somebody edited or wrote it by hand."""


def sealed(text: str) -> str:
    """Return a definition's text with its checksum filled in."""
    assert text.count(OPEN_SEAL) == 1, "a definition has one seal"
    return text.replace(OPEN_SEAL, hashlib.sha256(text.encode()).hexdigest())


def is_untouched(text: str) -> bool:
    """Whether a file is unchanged since `sealed` made it."""
    found = _SEAL.findall(text)
    return len(found) == 1 and sealed(_SEAL.sub(OPEN_SEAL, text)) == text


@dataclasses.dataclass(frozen=True, slots=True)
class DefinitionFile:
    """The file that makes a service known to its manager. Its methods also raise OSError."""

    path: Path

    def state(self, wanted: str | None = None) -> ServiceFileState:
        """Return how the file compares to the text `wanted`; without one, whether it may be removed."""
        if not os.path.lexists(self.path):
            return ServiceFileState.ABSENT
        try:
            text = self.path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            return ServiceFileState.CHANGED
        if text == wanted:
            return ServiceFileState.SAME
        # A link leads to somebody's own file, or to nothing, which is how systemd masks a unit.
        is_ours = is_untouched(text) and not self.path.is_symlink()
        return ServiceFileState.OLDER if is_ours else ServiceFileState.CHANGED

    def write(self, text: str, *, is_forced: bool) -> None:
        """Write `text` atomically; raises ServiceError if an edited file would be lost."""
        self._guard(self.state(text), is_forced=is_forced, verb="replaces")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.chmod(0o644)
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def guard_removal(self, *, is_forced: bool) -> None:
        """Raise ServiceError if there is no file, or an edited one without `is_forced`."""
        state = self.state()
        if state is ServiceFileState.ABSENT:
            raise ServiceError(f"no service is installed: {self.path} does not exist")
        self._guard(state, is_forced=is_forced, verb="removes")

    def _guard(self, state: ServiceFileState, *, is_forced: bool, verb: str) -> None:
        if state is ServiceFileState.CHANGED and not is_forced:
            raise ServiceError(
                f"{self.path} was edited after `service install` wrote it; check it, then --force {verb} it"
            )


_ANSWER_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What a manager says about the service."""

    is_running: bool
    facts: dict[str, str]
    """The manager's own values, by its names: state, process, number of restarts."""


def answer_of(command: Sequence[str], *, timeout_s: float = _ANSWER_TIMEOUT_S) -> str:
    """Return what a manager's program prints; raises ServiceError with its own words if it fails."""
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
        raise ServiceError(f"{command[0]} is not on this machine; --print shows the file") from error
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"`{shown}` did not finish within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "no output"
        raise ServiceError(f"`{shown}` exited with code {done.returncode}: {said}")
    return done.stdout


UNIT = "icehouse.service"
"""Also the name of its template, in this module's folder."""

_UNIT_FACTS = ("ActiveState", "SubState", "Result", "MainPID", "NRestarts", "StatusText")


@dataclasses.dataclass(frozen=True, slots=True)
class Systemd:
    """The user's own manager."""

    config_folder: Path
    """XDG's, ~/.config by default."""
    name: str = "systemd"
    hints: tuple[str, ...] = (
        "its log: journalctl --user -u icehouse -f",
        "it stops when you log out, unless you run: loginctl enable-linger",
    )

    @property
    def path(self) -> Path:
        return self.config_folder / "systemd" / "user" / UNIT

    def text_of(self, definition: ServiceDefinition) -> str:
        """Return the unit; raises ServiceError for a path that a unit cannot contain."""
        variables = [f"{name}={value}" for name, value in definition.environment.items()]
        environment = "".join(f"Environment={_quoted(each)}\n" for each in variables)
        program, *arguments = definition.command
        if any(character in program for character in "\"'\\"):
            raise ServiceError(
                f"systemd cannot run a program with quotes or backslashes in its path: {program}"
            )
        words = [_quoted(program), *(_quoted(word).replace("$", "$$") for word in arguments)]
        template = importlib.resources.files("icehouse_server.cli.service").joinpath(UNIT)
        return sealed(
            template.read_text(encoding="utf-8").format(
                seal=SEAL_LINE,
                command=" ".join(words),
                environment=environment,
                stop_timeout_s=definition.stop_timeout_s,
            )
        )

    def start(self) -> None:
        """Enable the unit and start or restart it; the model is loaded later."""
        self.forget()
        _systemctl("enable", UNIT)
        # Do not wait: the first start may fetch a model.
        _systemctl("restart", "--no-block", UNIT)

    def stop(self, *, timeout_s: float) -> None:
        _systemctl("disable", "--now", UNIT, timeout_s=timeout_s)

    def forget(self) -> None:
        _systemctl("daemon-reload")

    def status(self) -> ServiceStatus:
        lines = _systemctl("show", UNIT, f"--property={','.join(_UNIT_FACTS)}").splitlines()
        properties = dict(line.split("=", 1) for line in lines if "=" in line)
        facts = {name: properties[name] for name in _UNIT_FACTS if properties.get(name)}
        return ServiceStatus(is_running=facts.get("ActiveState") == "active", facts=facts)


def _systemctl(*arguments: str, timeout_s: float = _ANSWER_TIMEOUT_S) -> str:
    return answer_of(("systemctl", "--user", "--no-pager", *arguments), timeout_s=timeout_s)


def _quoted(word: str) -> str:
    """Return a word as written in a unit (systemd.syntax(7), systemd.unit(5)): specifiers begin with %."""
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        raise ServiceError(f"{word!r} has a control character, which a unit file cannot contain")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    is_plain = escaped == word and word and not any(character in word for character in " ';#")
    return word if is_plain else f'"{escaped}"'


LABEL = "dev.icehouse.serve"

_DOCTYPE_END = b'PropertyList-1.0.dtd">\n'
_AGENT_FACTS = ("state", "pid", "runs", "last exit code")
_AGENT_FACT = re.compile(rf"^\t({'|'.join(_AGENT_FACTS)}) = (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Launchd:
    """Agents of the user's session. A daemon has no GPU before somebody logs in, and no keychain."""

    home: Path
    name: str = "launchd"

    @property
    def path(self) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    @property
    def log_path(self) -> Path:
        """Where the server's lines go. It grows forever; newsyslog can rotate it."""
        return self.home / "Library" / "Logs" / "icehouse.log"

    @property
    def hints(self) -> tuple[str, ...]:
        return (f"its log: {self.log_path}",)

    def text_of(self, definition: ServiceDefinition) -> str:
        """Return the property list; raises ServiceError for text that XML cannot contain."""
        agent: dict[str, object] = {
            "Label": LABEL,
            "ProgramArguments": list(definition.command),
            "RunAtLoad": True,
            # A drained server stays down, a failed one is restarted.
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": definition.stop_timeout_s,
            # Otherwise macOS may run it on the efficiency cores and throttle its disk.
            "ProcessType": "Interactive",
            "Umask": 0o077,
            # A core dump would contain prompts.
            "SoftResourceLimits": {"NumberOfFiles": 65536, "Core": 0},
            "StandardErrorPath": str(self.log_path),
        }
        if definition.environment:
            agent["EnvironmentVariables"] = dict(definition.environment)
        try:
            head, end, body = plistlib.dumps(agent, sort_keys=False).partition(_DOCTYPE_END)
        except ValueError as error:
            raise ServiceError(
                f"{definition.command} cannot be written to a property list: {error}"
            ) from error
        return sealed(f"{(head + end).decode()}<!-- {SEAL_LINE} -->\n{body.decode()}")

    def start(self) -> None:
        """Load the agent, replacing a loaded one."""
        if self._is_loaded():
            answer_of(("launchctl", "bootout", _target()))
        answer_of(("launchctl", "bootstrap", _domain(), str(self.path)))

    def stop(self, *, timeout_s: float) -> None:
        """Unload the agent, which stops the server cleanly."""
        if self._is_loaded():
            answer_of(("launchctl", "bootout", _target()), timeout_s=timeout_s)

    def forget(self) -> None:
        """Do nothing: launchd reads the file only when it loads it."""

    def status(self) -> ServiceStatus:
        if not self._is_loaded():
            return ServiceStatus(is_running=False, facts={"state": "not loaded"})
        facts = dict(_AGENT_FACT.findall(answer_of(("launchctl", "print", _target()))))
        return ServiceStatus(is_running=facts.get("state") == "running", facts=facts)

    def _is_loaded(self) -> bool:
        lines = answer_of(("launchctl", "list")).splitlines()
        return any(line.split("\t")[-1] == LABEL for line in lines)


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target() -> str:
    return f"{_domain()}/{LABEL}"
