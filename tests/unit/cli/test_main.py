"""The command line as a process sees it: exit codes and one line of what to do."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from icehouse_server.cli import main as cli
from icehouse_server.cli.flags import OFTEN_SET, value_text
from icehouse_server.config import SETTINGS
from icehouse_server.errors import IcehouseError
from typer.testing import CliRunner, Result


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr("sys.argv", ["icehouse", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "demo", "generate", "cache", "doctor", "config", "version"):
        assert re.search(rf"\b{command}\b", result.stdout), command


@pytest.mark.parametrize("command", ["serve", "config", "doctor"])
def test_all_of_the_help_has_flag_and_variable_of_every_setting(command: str) -> None:
    text = run(command, "--help-all").stdout
    assert [s.flag for s in SETTINGS if not re.search(rf"{s.flag}\b", text)] == []
    # Long ones are broken over lines.
    joined = re.sub(r"[\s│]", "", text)
    assert [s.variable for s in SETTINGS if f"(env:{s.variable})" not in joined] == []


def test_help_of_serve_is_one_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("serve", "--help").stdout.splitlines()
    shown = {s.key for s in SETTINGS if re.search(rf"^│ {s.flag} ", "\n".join(lines), re.MULTILINE)}
    assert len(lines) <= 45 and shown == set(OFTEN_SET)


def test_the_model_needs_no_flag() -> None:
    said = run("serve", "--no-preload", "./nowhere")
    assert isinstance(said.exception, IcehouseError) and "./nowhere" in str(said.exception)
    twice = run("serve", "./nowhere", "--model", "demo")
    assert twice.exit_code == 2 and "said twice" in twice.output


@pytest.mark.parametrize(
    ("words", "found"), [("icehouse expl", "explain"), ("icehouse serve --prefill-sl", "--prefill-slice-ms")]
)
def test_shells_complete_commands_and_options(words: str, found: str) -> None:
    environ = {
        "_ICEHOUSE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = CliRunner().invoke(cli.app, [], env=environ, prog_name="icehouse")
    assert result.stdout.split() == [found]


def test_facts_are_printed_as_json_too() -> None:
    config = json.loads(run("config", "--json", "--port", "7").stdout)
    version = json.loads(run("version", "--json").stdout)
    token = json.loads(run("token", "new", "--tenant", "t", "--json").stdout)
    assert config["server.port"] == {"value": 7, "source": "--port"} and len(config) == len(SETTINGS)
    assert version["version"] == run("--version").stdout.strip() == run("version").stdout.strip()
    assert token["line"].startswith("sha256=") and token["token"]


def test_config_shows_value_and_source() -> None:
    result = run("config", "--port", "7", "--ssd-bytes", "4GiB", "--no-cache")
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    assert lines["server.port"] == ["7", "--port"]
    assert lines["cache.ssd_bytes"] == ["4", "GiB", "--ssd-bytes"]
    assert lines["cache.enabled"] == ["off", "--cache"]
    assert lines["server.host"] == ["127.0.0.1", "default"]
    assert len(lines) == len(SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("serve", "--port", "x"), 2, "server.port = 'x' (from --port) is not a whole number"),
        (("config", "--config", "/nowhere.toml"), 2, "cannot read the config file"),
        (("serve", "--no-preload", "--model", "./nowhere"), 1, "there is no model folder"),
        (("generate", "hi", "--address", "127.0.0.1:1"), 1, "no server answers at 127.0.0.1:1"),
        (("generate", "caf\udce9", "--address", "127.0.0.1:1"), 2, "bytes that are no UTF-8"),
        (("models", "--address", "http://localhost:1"), 2, "is a URL; say host:port"),
        (("models", "--address", "localhost"), 2, "has no port; say host:port"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr("icehouse_server.cli.main.setup_logging", lambda config: None)
    assert run_main(monkeypatch, *arguments) == code
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(lines) == 1 and words in lines[0], lines


def test_a_client_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # So Python says that a package is not there.
    monkeypatch.setitem(sys.modules, "icehouse_client", None)
    monkeypatch.delitem(sys.modules, "icehouse_server.cli.client.connection", raising=False)
    assert run_main(monkeypatch, "models", "--address", "127.0.0.1:1") == 1
    assert "need the Python client, which is not installed" in capfd.readouterr().err


def test_an_unknown_variable_stops_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICEHOUSE_CACHE_RAM_BITES", "1")
    result = run("config")
    assert isinstance(result.exception, IcehouseError)
    assert "ICEHOUSE_CACHE_RAM_BYTES" in str(result.exception)


def test_values_are_for_people() -> None:
    by_key = {s.key: s for s in SETTINGS}
    assert value_text(by_key["cache.ssd_bytes"], 32 << 30) == "32 GiB"
    assert value_text(by_key["cache.adopt_budget_ms"], 5.0) == "5 ms"
    assert value_text(by_key["cache.enabled"], False) == "off"
    assert value_text(by_key["server.uds"], None) == "none"


def test_a_terminal_without_unicode_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(cli, "app", lambda: print("ice · 🧊", flush=True))
    monkeypatch.setattr("sys.argv", ["icehouse"])
    cli.main()
    assert raw.getvalue() == b"ice ? ?\n"
