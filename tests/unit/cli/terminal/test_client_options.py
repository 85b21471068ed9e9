"""Options of commands that call a server: what is half said or cannot be read, and their variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
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
@pytest.mark.parametrize("content", [b"", b"sha256=ab tenant=t role=tenant\n", b"one\ntwo\n", b"\xff\x00"])
def test_a_file_without_a_token_is_told_before_the_call(
    command: list[str], content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "token").write_bytes(content)
    result = CliRunner().invoke(app, [*command, "--token", str(tmp_path / "token")])
    assert isinstance(result.exception, ConfigError)
    assert "which holds no bearer token" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--seed", "-1"), "--seed"),
        (("--max-output-tokens", "99999999999"), "--max-output-tokens"),
        (("--timeout-s", "-1"), "--timeout-s"),
        (("--tokens", "99999999999999999999"), "is no token id"),
    ],
)
def test_numbers_that_no_request_can_hold_are_refused(options: tuple[str, str], wanted: str) -> None:
    words = () if "--tokens" in options else ("Hi",)
    result = CliRunner().invoke(app, ["generate", *words, *options], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and wanted in result.stderr


ASKING = (
    *("generate", "chat", "models", "info", "stats", "requests", "cancel", "top", "health", "bench"),
    *("explain", "warm", "pin", "unpin", "evict", "tokenize", "detokenize", "embed"),
)
WITHOUT_JSON = {"serve", "demo", "change", "install", "uninstall"}
"""What does something, and prints no facts."""


def commands_of(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of the command line, those of groups too, with its name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


ALL = dict(commands_of(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ASKING)
def test_help_names_every_variable(name: str) -> None:
    text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).stdout
    assert [variable for variable in ClientVariable if variable not in text] == []


def test_who_asks_a_server_has_all_of_the_options_and_nobody_else_one() -> None:
    wanted = {"address", "token", "tls", "ca", "certificate", "key"}
    found = {name for name, command in ALL.items() if "address" in {p.name for p in command.params}}
    assert found == set(ASKING)
    assert [name for name in found if not wanted <= {p.name for p in ALL[name].params}] == []


def test_every_command_that_prints_facts_prints_json() -> None:
    silent = [name for name, command in ALL.items() if not any("--json" in p.opts for p in command.params)]
    assert {name.rpartition(" ")[2] for name in silent} == WITHOUT_JSON


def test_the_server_passes_them_over() -> None:
    assert load_config(environ=dict.fromkeys(ClientVariable, "x")).config == Config()
