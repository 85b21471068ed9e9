"""`icehouse service`: what it writes, what it asks of systemd or launchd, and what it leaves alone.

The managers' programs are scripts that write down how they were called and answer as the real ones do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from icehouse_server.cli.main import app
from icehouse_server.cli.service import service_commands as commands
from icehouse_server.cli.service.managers import LABEL
from icehouse_server.errors import ConfigError
from typer.testing import CliRunner, Result

SCRIPT = """#!/bin/sh
echo "$(basename "$0") $*" >> "{calls}"
case "$*" in
    *show*) printf 'ActiveState=active\\nSubState=running\\nMainPID=7\\nStatusText=serving a=b\\n' ;;
    list) printf 'PID\\tStatus\\tLabel\\n7\\t0\\t{label}\\n' ;;
    print*) printf 'gui/1/x = {{\\n\\tstate = running\\n\\tpid = 7\\n\\tlast exit code = 0\\n}}\\n' ;;
esac
"""


class Machine:
    """A home folder, and the programs of a service manager that record their calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = folder / "home"
        self.programs = folder / "bin"
        self._calls = folder / "calls"
        self.home.mkdir()
        self.programs.mkdir()
        for name in ("systemctl", "launchctl"):
            self.replace(name, SCRIPT.format(calls=self._calls, label=LABEL))
        monkeypatch.setenv("PATH", f"{self.programs}:/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.setenv("NO_COLOR", "1")
        for name in ("XDG_CONFIG_HOME", "ICEHOUSE_CONFIG", "XDG_CACHE_HOME", "HF_HOME"):
            monkeypatch.delenv(name, raising=False)

    def replace(self, name: str, script: str) -> None:
        """Have another script be a manager's program."""
        (self.programs / name).write_text(script)
        (self.programs / name).chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """What the programs were called with."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.replace("--user --no-pager ", "") for line in lines]

    @property
    def unit(self) -> Path:
        return self.home / ".config" / "systemd" / "user" / "icehouse.service"

    @property
    def agent(self) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(sys, "platform", "linux")
    return Machine(tmp_path, monkeypatch)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["service", *arguments])


def test_a_service_comes_runs_and_goes(machine: Machine, tmp_path: Path) -> None:
    (settings := tmp_path / "my settings.toml").write_text("[server]\nport = 7\n")
    assert run("install", "demo", "--config", str(settings)).exit_code == 0
    text = machine.unit.read_text()
    assert f'serve demo --config "{settings}"\n' in text and "\nType=notify\n" in text
    assert run("status").exit_code == 0
    assert run("uninstall").exit_code == 0
    assert not machine.unit.exists()
    changes = [call for call in machine.calls if " show " not in call]
    assert changes == [
        "systemctl daemon-reload",
        "systemctl enable icehouse.service",
        "systemctl restart --no-block icehouse.service",
        "systemctl disable --now icehouse.service",
        "systemctl daemon-reload",
    ]


def test_on_a_mac_it_is_an_agent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run("install", "demo").exit_code == 0 and machine.agent.is_file()
    told = json.loads(run("status", "--json").stdout)
    assert told["running"] and told["facts"] == {"state": "running", "pid": "7", "last exit code": "0"}
    assert run("uninstall").exit_code == 0 and not machine.agent.exists()
    orders = [call.split()[1] for call in machine.calls]
    assert [each for each in orders if each not in ("list", "print")] == ["bootout", "bootstrap", "bootout"]


def test_printing_installs_nothing(machine: Machine) -> None:
    shown = run("install", "--print")
    assert shown.exit_code == 0 and "ExecStart=" in shown.stdout
    assert not machine.unit.exists() and machine.calls == []


def test_a_changed_file_stays_unless_forced(machine: Machine) -> None:
    run("install", "demo")
    machine.unit.write_text(changed := machine.unit.read_text().replace("UMask=0077", "UMask=0022"))
    before = len(machine.calls)
    for order in (("install", "demo"), ("uninstall",)):
        refused = run(*order)
        assert refused.exit_code == 1 and "--force" in refused.output
        assert machine.unit.read_text() == changed
    assert all(" show " in call for call in machine.calls[before:])
    assert json.loads(run("status", "--json").stdout)["changed"]
    assert run("install", "demo", "--force").exit_code == 0
    assert machine.unit.read_text() != changed


def test_a_file_that_cannot_be_written_is_one_line(machine: Machine) -> None:
    (machine.home / ".config").write_text("")
    refused = run("install", "demo")
    assert refused.exit_code == 1 and "Not a directory" in refused.output and ".config" in refused.output
    assert "Traceback" not in refused.output


def test_no_variable_and_no_secret_reaches_the_file(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-sesame")
    monkeypatch.setenv("ICEHOUSE_CACHE_KEY_COMMAND", "echo sesame")
    monkeypatch.setenv("ICEHOUSE_CLIENT_TOKEN_FILE", "/sesame")
    done = run("install", "demo")
    assert "sesame" not in machine.unit.read_text() + done.output
    assert "to the --config file: HF_TOKEN, ICEHOUSE_CACHE_KEY_COMMAND\n" in done.output


def test_the_config_file_of_the_environment_counts(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.toml").write_text("[server]\ndrain_grace_s = 100.0\n[log]\nformat = 'text'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ICEHOUSE_CONFIG", "own.toml")
    text = run("install", "--print").stdout
    assert f"--config {tmp_path / 'own.toml'}\n" in text
    # As long as this file's stop may take; its own log format is left to it.
    assert "TimeoutStopSec=160\n" in text and "ICEHOUSE_LOG_FORMAT" not in text


def test_settings_that_the_server_would_refuse_are_refused_now(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[server]\nprot = 7\n")
    for arguments in (("--config", str(tmp_path / "bad.toml")), ("--config", str(tmp_path / "none.toml"))):
        assert isinstance(run("install", *arguments).exception, ConfigError)
    assert not machine.unit.exists()


def test_a_models_folder_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    words = [commands.definition_of(model=m, config=None).command[-1] for m in ("mine", "demo", "org/hub-id")]
    assert words == [str(tmp_path / "mine"), "demo", "org/hub-id"]


def test_a_file_of_nobodys_home_cannot_be_read() -> None:
    assert isinstance(run("install", "--print", "--config", "~no-such-user/a.toml").exception, ConfigError)
    command = commands.definition_of(model="~no-such-user/model", config=None).command
    assert command[-1] == "~no-such-user/model"


def test_the_port_of_http_is_passed_on_and_checked() -> None:
    command = commands.definition_of(model="demo", config=None, http_port="8000").command
    assert command[-3:] == ("demo", "--http-port", "8000")
    assert isinstance(run("install", "--print", "--http-port", "x").exception, ConfigError)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho 'Failed to connect to bus' >&2; exit 1\n", "Failed to connect to bus"),
        (None, "systemctl is not on this machine"),
    ],
)
def test_where_no_manager_answers_nothing_is_written(
    script: str | None, said: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(machine.home))
    else:
        machine.replace("systemctl", script)
    refused = run("install", "demo")
    assert refused.exit_code == 1 and said in refused.output and not machine.unit.exists()


def test_status_of_what_is_not_there(machine: Machine) -> None:
    told = run("status", "--json")
    assert told.exit_code == 1 and not json.loads(told.stdout)["installed"] and machine.calls == []
    assert "no service is installed" in run("uninstall").output


def test_another_system_is_told_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd")
    refused = run("install")
    assert refused.exit_code == 1 and "freebsd" in refused.output
