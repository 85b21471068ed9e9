"""systemd's unit of a user: what systemd itself makes of it, whatever the paths hold."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from icehouse_server.cli.service.managers import ServiceDefinition, ServiceError, Systemd, is_untouched
from icehouse_server.config import Config

from tests.tidy.tree import ROOT

DEFINITION = ServiceDefinition(
    command=("/opt/my icehouse/50%/bin/icehouse", "serve", 'a "b" \\c', "--config", "/tmp/$HOME;#'x'.toml"),
    environment={"ICEHOUSE_LOG_FORMAT": "json"},
    stop_timeout_s=91,
)
SYSTEMD = Systemd(Path("/nowhere"))


def entries(text: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser["Service"]


def test_words_are_quoted_as_units_have_them() -> None:
    service = entries(SYSTEMD.text_of(DEFINITION))
    assert service["ExecStart"] == (
        '"/opt/my icehouse/50%%/bin/icehouse" serve "a \\"b\\" \\\\c" --config "/tmp/$$HOME;#\'x\'.toml"'
    )
    assert service["Environment"] == "ICEHOUSE_LOG_FORMAT=json" and service["TimeoutStopSec"] == "91"


def test_a_path_that_no_line_can_hold_is_refused() -> None:
    with pytest.raises(ServiceError, match="control character"):
        SYSTEMD.text_of(ServiceDefinition(("/bin/icehouse", "a\nExecStartPre=/bin/rm"), {}, 1))


@pytest.mark.parametrize("program", ["/opt/it's/icehouse", '/opt/"it"/icehouse', "/opt/i\\t/icehouse"])
def test_a_program_that_systemd_would_not_run_is_refused(program: str) -> None:
    with pytest.raises(ServiceError, match="quotes or backslashes"):
        SYSTEMD.text_of(ServiceDefinition((program, "serve"), {}, 1))


def test_the_unit_is_under_its_seal() -> None:
    assert is_untouched(SYSTEMD.text_of(DEFINITION))


def test_the_units_of_a_user_and_of_the_machine_say_the_same_of_the_server() -> None:
    ours = entries(SYSTEMD.text_of(DEFINITION))
    machines = entries((ROOT / "deploy" / "systemd" / "icehouse.service").read_text())
    shared = (ours.keys() & machines.keys()) - {"ExecStart", "Environment", "TimeoutStopSec"}
    assert {"Type", "WatchdogSec", "NotifyAccess", "TimeoutStartSec", "Restart", "UMask"} <= shared
    assert {name: ours[name] for name in shared} == {name: machines[name] for name in shared}
    # A slow step is not a stuck one: callers are sent elsewhere long before.
    assert float(ours["WatchdogSec"]) > 20 * Config().server.stuck_timeout_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "50% of $it" / "true"
    program.parent.mkdir()
    program.symlink_to(shutil.which("true") or "/bin/true")
    command = (str(program), *DEFINITION.command[1:])
    unit = tmp_path / "icehouse.service"
    unit.write_text(SYSTEMD.text_of(ServiceDefinition(command, DEFINITION.environment, 91)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if re.search("icehouse|true", line)]
    assert said == []
