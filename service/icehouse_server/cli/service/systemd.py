"""systemd's unit of a user: its text, and `systemctl --user`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from icehouse_server.cli.service.definition import SEAL_LINE, ServiceDefinition, ServiceError, sealed
from icehouse_server.cli.service.manager import ServiceStatus, answer_of

UNIT = "icehouse.service"

_FACTS = ("ActiveState", "SubState", "Result", "MainPID", "NRestarts", "StatusText")

_UNIT_TEXT = """\
# {seal}
[Unit]
Description=Icehouse, MLX language models over gRPC

[Service]
# The server says when it serves, which takes as long as fetching the model does the first time, and from then
# on that its inference thread answers. One that is silent for so long is ended and started again.
Type=notify
NotifyAccess=main
TimeoutStartSec=infinity
WatchdogSec=120
ExecStart={command}
{environment}KillSignal=SIGTERM
# Running calls end, then the RAM tier goes to SSD.
TimeoutStopSec={stop_timeout_s}
Restart=on-failure
RestartSec=5
UMask=0077
LimitNOFILE=65536
# A core dump would hold prompts.
LimitCORE=0
OOMPolicy=stop
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=default.target
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Systemd:
    """The user's own manager."""

    config_folder: Path
    """XDG's, ~/.config by default."""
    name: str = "systemd"
    hints: tuple[str, ...] = (
        "its log: journalctl --user -u icehouse -f",
        "it ends when you log out, unless you say: loginctl enable-linger",
    )

    @property
    def path(self) -> Path:
        """The unit's file."""
        return self.config_folder / "systemd" / "user" / UNIT

    def text_of(self, definition: ServiceDefinition) -> str:
        """Return the unit; raises ServiceError for a path that no unit can name."""
        variables = [f"{name}={value}" for name, value in definition.environment.items()]
        environment = "".join(f"Environment={_quoted(each)}\n" for each in variables)
        program, *arguments = definition.command
        if any(character in program for character in "\"'\\"):
            raise ServiceError(f"systemd runs no program whose path has quotes or backslashes: {program}")
        words = [_quoted(program), *(_quoted(word).replace("$", "$$") for word in arguments)]
        return sealed(
            _UNIT_TEXT.format(
                seal=SEAL_LINE,
                command=" ".join(words),
                environment=environment,
                stop_timeout_s=definition.stop_timeout_s,
            )
        )

    def start(self) -> None:
        """Enable the unit and start it, or start it again; the model is loaded later."""
        self.forget()
        _systemctl("enable", UNIT)
        # Not waited for: the first start may fetch a model.
        _systemctl("restart", "--no-block", UNIT)

    def stop(self, *, timeout_s: float) -> None:
        """Disable the unit and stop it, in order."""
        _systemctl("disable", "--now", UNIT, timeout_s=timeout_s)

    def forget(self) -> None:
        """Read the units anew."""
        _systemctl("daemon-reload")

    def status(self) -> ServiceStatus:
        """Return its state, process and restarts."""
        lines = _systemctl("show", UNIT, f"--property={','.join(_FACTS)}").splitlines()
        told = dict(line.split("=", 1) for line in lines if "=" in line)
        facts = {name: told[name] for name in _FACTS if told.get(name)}
        return ServiceStatus(is_running=facts.get("ActiveState") == "active", facts=facts)


def _systemctl(*arguments: str, timeout_s: float | None = None) -> str:
    command = ("systemctl", "--user", "--no-pager", *arguments)
    return answer_of(command) if timeout_s is None else answer_of(command, timeout_s=timeout_s)


def _quoted(word: str) -> str:
    """Return a word as a unit has it (systemd.syntax(7), systemd.unit(5)): specifiers begin with %."""
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        raise ServiceError(f"{word!r} has a control character, which no unit file can hold")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    is_plain = escaped == word and word and not any(character in word for character in " ';#")
    return word if is_plain else f'"{escaped}"'
