"""Options of commands that call a server: what is half said or cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_client.cli.console import UsageError
from icehouse_client.cli.main import app
from typer.testing import CliRunner

COMMANDS = pytest.mark.parametrize("command", [["top"], ["generate", "Hi"]], ids=lambda c: c[0])


@COMMANDS
@pytest.mark.parametrize(("given", "missing"), [("--key", "--certificate"), ("--certificate", "--key")])
def test_half_of_a_certificate_is_refused(
    command: list[str], given: str, missing: str, tmp_path: Path
) -> None:
    (tmp_path / "half").touch()
    result = CliRunner().invoke(app, [*command, given, str(tmp_path / "half")])
    assert isinstance(result.exception, UsageError)
    assert f"{missing} is missing" in str(result.exception)


@COMMANDS
@pytest.mark.parametrize("flag", ["--token", "--ca"])
def test_a_file_that_is_not_there_is_named(command: list[str], flag: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, flag, str(tmp_path / "none")])
    assert isinstance(result.exception, UsageError)
    assert f"{flag} names {tmp_path / 'none'}" in str(result.exception)


@COMMANDS
@pytest.mark.parametrize("content", [b"", b"sha256=ab tenant=t role=tenant\n", b"one\ntwo\n", b"\xff\x00"])
def test_a_file_without_a_token_is_told_before_the_call(
    command: list[str], content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "token").write_bytes(content)
    result = CliRunner().invoke(app, [*command, "--token", str(tmp_path / "token")])
    assert isinstance(result.exception, UsageError)
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
