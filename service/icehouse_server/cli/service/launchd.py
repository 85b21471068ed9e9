"""launchd's agent of a user: its property list, and `launchctl`."""

from __future__ import annotations

import dataclasses
import os
import plistlib
import re
from pathlib import Path

from icehouse_server.cli.service.definition import SEAL_LINE, ServiceDefinition, ServiceError, sealed
from icehouse_server.cli.service.manager import ServiceStatus, answer_of

LABEL = "dev.icehouse.serve"

_DOCTYPE_END = b'PropertyList-1.0.dtd">\n'
_FACTS = ("state", "pid", "runs", "last exit code")
_FACT = re.compile(rf"^\t({'|'.join(_FACTS)}) = (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Launchd:
    """Agents of the user's session. A daemon has no GPU before somebody logs in, and no keychain."""

    home: Path
    name: str = "launchd"

    @property
    def path(self) -> Path:
        """The agent's file."""
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    @property
    def log_path(self) -> Path:
        """Where the server's lines go. It grows for ever: newsyslog turns it over."""
        return self.home / "Library" / "Logs" / "icehouse.log"

    @property
    def hints(self) -> tuple[str, ...]:
        """Where the log is."""
        return (f"its log: {self.log_path}",)

    def text_of(self, definition: ServiceDefinition) -> str:
        """Return the property list; raises ServiceError for text that XML cannot hold."""
        agent: dict[str, object] = {
            "Label": LABEL,
            "ProgramArguments": list(definition.command),
            "RunAtLoad": True,
            # A drained server stays down, a failed one comes back.
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ExitTimeOut": definition.stop_timeout_s,
            # Otherwise macOS may keep it on the efficiency cores and throttle its disk.
            "ProcessType": "Interactive",
            "Umask": 0o077,
            # A core dump would hold prompts.
            "SoftResourceLimits": {"NumberOfFiles": 65536, "Core": 0},
            "StandardErrorPath": str(self.log_path),
        }
        if definition.environment:
            agent["EnvironmentVariables"] = dict(definition.environment)
        try:
            head, end, body = plistlib.dumps(agent, sort_keys=False).partition(_DOCTYPE_END)
        except ValueError as error:
            raise ServiceError(f"{definition.command} cannot be said in a property list: {error}") from error
        return sealed(f"{(head + end).decode()}<!-- {SEAL_LINE} -->\n{body.decode()}")

    def start(self) -> None:
        """Load the agent, in the place of one that is loaded."""
        if self._is_loaded():
            answer_of(("launchctl", "bootout", _target()))
        answer_of(("launchctl", "bootstrap", _domain(), str(self.path)))

    def stop(self, *, timeout_s: float) -> None:
        """Take the agent out, which ends the server in order."""
        if self._is_loaded():
            answer_of(("launchctl", "bootout", _target()), timeout_s=timeout_s)

    def forget(self) -> None:
        """Do nothing: launchd looks at the file when it loads it."""

    def status(self) -> ServiceStatus:
        """Return its state, process, starts and last exit code."""
        if not self._is_loaded():
            return ServiceStatus(is_running=False, facts={"state": "not loaded"})
        facts = dict(_FACT.findall(answer_of(("launchctl", "print", _target()))))
        return ServiceStatus(is_running=facts.get("state") == "running", facts=facts)

    def _is_loaded(self) -> bool:
        lines = answer_of(("launchctl", "list")).splitlines()
        return any(line.split("\t")[-1] == LABEL for line in lines)


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target() -> str:
    return f"{_domain()}/{LABEL}"
