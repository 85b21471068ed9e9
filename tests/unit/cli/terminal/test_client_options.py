"""Options of commands that call a server: what is half said or cannot be read, and their variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.cli.main import app
from icehouse_server.config import Config, load_config
from icehouse_server.config.load import ClientVariable
from icehouse_server.errors import ConfigError
from typer.testing import CliRunner

COMMANDS = pytest.mark.parametrize("command", [["top"], ["generate", "Hi"]], ids=lambda c: c[0])


@COMMANDS
@pytest.mark.parametrize(("given", "missing"), [("--key", "--certificate"), ("--certificate", "--key")])
def test_half_of_a_certificate_is_refused(
    command: list[str], given: str, missing: str, tmp_path: Path
) -> None:
    (tmp_path / "half").touch()
    result = CliRunner().invoke(app, [*command, given, str(tmp_path / "half")])
    assert isinstance(result.exception, ConfigError)
    assert f"{missing} is missing" in str(result.exception)


@COMMANDS
@pytest.mark.parametrize("flag", ["--token", "--ca"])
def test_a_file_that_is_not_there_is_named(command: list[str], flag: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, flag, str(tmp_path / "none")])
    assert isinstance(result.exception, ConfigError)
    assert f"{flag} names {tmp_path / 'none'}" in str(result.exception)


@COMMANDS
def test_help_names_every_variable(command: list[str]) -> None:
    text = CliRunner().invoke(app, [command[0], "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).stdout
    assert [variable for variable in ClientVariable if variable not in text] == []


def test_the_server_passes_them_over() -> None:
    assert load_config(environ=dict.fromkeys(ClientVariable, "x")).config == Config()
