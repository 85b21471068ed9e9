"""Options of commands that call a server: what is half said or cannot be read."""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from icehouse_client import cli
from icehouse_client.cli import connection
from icehouse_client.cli.console import UsageError
from icehouse_client.cli.main import app
from icehouse_server.config import ServerConfig
from typer.testing import CliRunner

from tests.unit.rpc.conftest import RunningServer

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
    assert "which has no bearer token" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--seed", "-1"), "--seed"),
        (("--max-output-tokens", "99999999999"), "--max-output-tokens"),
        (("--timeout-s", "-1"), "--timeout-s"),
        (("--timeout-s", "inf"), "--timeout-s"),
        (("--tokens", "99999999999999999999"), "is not a token id"),
    ],
)
def test_numbers_that_no_request_can_hold_are_refused(options: tuple[str, str], wanted: str) -> None:
    words = () if "--tokens" in options else ("Hi",)
    result = CliRunner().invoke(app, ["generate", *words, *options], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and wanted in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("rerank", "q", "d", "--top-count", "99999999999"),
        ("embed", "Hi", "--dimensions", "99999999999"),
        ("pin", "Hi", "--ttl", "99999999999999999999h"),
    ],
    ids=lambda words: words[0],
)
def test_so_are_those_of_other_commands(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, [*words, "--address", "127.0.0.1:1"]).exit_code == 2


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://localhost:1", "is a URL"),
        ("ftp://localhost:1", "is a URL"),
        ("localhost", "has no port"),
        ("localhost:", "has no port"),
        (":50051", "has no host"),
        ("localhost:http", "has the port 'http'"),
        ("localhost:99999", "has the port '99999'"),
        ("localhost:-1", "has the port '-1'"),
        ("localhost:1/path", "has the port '1/path'"),
    ],
)
def test_what_is_no_address_is_told_before_the_call(address: str, problem: str) -> None:
    result = CliRunner().invoke(app, ["health", "--address", address])
    assert isinstance(result.exception, UsageError)
    assert f"the address {address!r} {problem}" in str(result.exception)


@pytest.mark.parametrize("address", ["unix:/none", "dns:///localhost:1", "ipv4:127.0.0.1:1", "[::1]:1"])
def test_what_grpc_knows_as_an_address_is_tried(address: str) -> None:
    assert CliRunner().invoke(app, ["health", "--address", address]).exit_code == 1


NOBODYS = "~no-such-user/file"


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "Hi", "--token", NOBODYS),
        ("generate", "Hi", "--ca", NOBODYS),
        ("generate", "--messages", NOBODYS),
        ("generate", "Hi", "--image", NOBODYS),
        ("chat", "--load", NOBODYS),
        ("export", "--all", "--to", NOBODYS),
        ("import", NOBODYS),
    ],
    ids=" ".join,
)
def test_a_file_of_nobodys_home_is_not_there(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--address", "127.0.0.1:1"])
    assert isinstance(result.exception, UsageError) and NOBODYS in str(result.exception)


def test_an_archive_may_lie_in_ones_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "archive").write_bytes(b"")
    told = CliRunner().invoke(app, ["import", "~/archive", "--address", "127.0.0.1:1"])
    assert told.exit_code == 1 and "no server answers" in told.stderr


def test_a_server_that_nobody_names_is_looked_for_where_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"localhost:{ServerConfig().port}" == connection.DEFAULT_ADDRESS
    monkeypatch.setattr(connection, "DEFAULT_ADDRESS", "127.0.0.1:1")
    told = CliRunner().invoke(app, ["health"])
    assert told.exit_code == 1 and "no server answers at 127.0.0.1:1" in told.stderr


async def test_nothing_is_said_beside_the_line(served: RunningServer) -> None:
    """gRPC's core tells of such a handshake too, unless it was told before its import that it may not."""
    program = "from icehouse_client.cli.main import main; main()"
    ask = [sys.executable, "-c", program, "health", "--tls", "--address", served.server.address]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environ.pop("GRPC_VERBOSITY", None)
    done = await asyncio.to_thread(subprocess.run, ask, env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and "do not agree on TLS" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_client_without_the_extra_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    # So Python says that a package is not there.
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(ModuleNotFoundError, match="extra `cli`"):
        runpy.run_path(str(cli.__file__))
