"""The command line as a process sees it: exit codes and one line of what to do."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from icehouse_client.cli import main as client
from icehouse_server.cli import main as cli
from icehouse_server.cli.flags import OFTEN_SET, value_text
from icehouse_server.config import SETTINGS, Config, load_config
from icehouse_server.config.load import CLIENT_VARIABLES
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


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_help_shows_what_is_often_set_in_groups_and_on_one_screen(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").stdout
    shown = [s.key for s in SETTINGS if re.search(rf"^│ {s.flag} ", text, re.MULTILINE)]
    often = {key for keys in OFTEN_SET.values() for key in keys}
    # `serve` takes the model without a flag.
    assert set(shown) == (often - {"model.model"} if command == "serve" else often)
    assert re.findall(r"^╭─ (.+?) ─", text, re.MULTILINE)[-len(OFTEN_SET) :] == list(OFTEN_SET)
    assert len(text.splitlines()) <= 62


def test_commands_are_in_groups_and_none_is_without() -> None:
    text = run("--help").stdout
    assert re.findall(r"^╭─ (.+?) ─", text, re.MULTILINE) == [
        *("Options", "Serve", "Ask", "Cache", "Models", "Manage")
    ]
    ask = text.partition("─ Ask ─")[2].partition("╰")[0]
    assert "rerank" in ask and "generate" in ask


def test_no_help_shows_the_names_that_python_has_for_types() -> None:
    for name in ALL:
        assert not re.search(r"<\w+|list\[", run(*name.split(), "--help").stdout), name


def test_the_model_needs_no_flag() -> None:
    said = run("serve", "--no-preload", "./nowhere")
    assert isinstance(said.exception, IcehouseError) and "./nowhere" in str(said.exception)
    twice = run("serve", "./nowhere", "--model", "demo")
    assert twice.exit_code == 2 and "given twice" in twice.output


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
        (("generate", "caf\udce9", "--address", "127.0.0.1:1"), 2, "not valid UTF-8"),
        (("models", "--address", "http://localhost:1"), 2, "is a URL; use host:port"),
        (("models", "--address", "localhost"), 2, "has no port; use host:port"),
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


def test_a_server_is_looked_for_where_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, place in (
        ({"ICEHOUSE_SERVER_HOST": "0.0.0.0", "ICEHOUSE_SERVER_PORT": "1"}, "127.0.0.1:1"),
        ({"ICEHOUSE_SERVER_UDS": "/nowhere/socket"}, "unix:/nowhere/socket"),
    ):
        told = CliRunner().invoke(cli.app, ["health"], env=settings)
        assert told.exit_code == 1 and f"no server answers at {place};" in told.stderr, told.output


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


ASKING = (
    *("generate", "chat", "models", "ps", "info", "stats", "requests", "cancel", "top", "health", "bench"),
    *(
        "explain",
        "warm",
        "pin",
        "unpin",
        "end-session",
        "evict",
        "export",
        "import",
        "tokenize",
        "detokenize",
        "embed",
        "rerank",
    ),
)
WITHOUT_JSON = {"serve", "demo", "http", "change", "install", "uninstall"}
"""What does something, and prints no facts."""


def commands_of(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of the command line, those of groups too, with its name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


ALL = dict(commands_of(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", ASKING)
def test_help_names_every_variable(name: str) -> None:
    text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).stdout
    assert [variable for variable in CLIENT_VARIABLES if variable not in text] == []


def test_the_client_offers_them_by_itself() -> None:
    ours = dict(commands_of(typer.main.get_command(client.app)))
    assert set(ours) == set(ASKING) - {"bench"}


def test_who_asks_a_server_has_all_of_the_options_and_nobody_else_one() -> None:
    wanted = {"address", "token", "tls", "ca", "certificate", "key"}
    found = {name for name, command in ALL.items() if "address" in {p.name for p in command.params}}
    assert found == set(ASKING)
    assert [name for name in found if not wanted <= {p.name for p in ALL[name].params}] == []


def test_every_command_that_prints_facts_prints_json() -> None:
    silent = [name for name, command in ALL.items() if not any("--json" in p.opts for p in command.params)]
    assert {name.rpartition(" ")[2] for name in silent} == WITHOUT_JSON


def test_http_is_the_command_of_its_own_package() -> None:
    told = run("http", "--help")
    assert told.exit_code == 0 and "--body-memory-bytes" in told.stdout
    assert run("http", "--alias", "half").exit_code == 2


def test_the_server_passes_the_variables_of_asking_over() -> None:
    variables = {p.envvar for p in ALL["health"].params if p.envvar}
    assert variables == set(CLIENT_VARIABLES)
    assert load_config(environ=dict.fromkeys(CLIENT_VARIABLES, "x")).config == Config()
