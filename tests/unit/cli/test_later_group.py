"""Groups of commands that are imported late: help is there without them, and each command with them."""

from __future__ import annotations

import subprocess
import sys

from icehouse_server.cli.main import app
from typer.testing import CliRunner

from tests.fixtures.patience import BOUND_S


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_help_of_all_imports_neither_numpy_nor_sqlite() -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path}\n"
        "from icehouse_server.cli.main import app\n"
        "try:\n    app(['--help'])\nfinally:\n"
        "    print('imported', sorted({'numpy', 'mlx', 'sqlite_utils', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S)
    assert "Inspect and check the SSD tier's directory" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "imported []"


def test_a_group_shows_its_commands() -> None:
    for group, commands in (("cache", ("ls", "verify", "purge")), ("key", ("new", "change"))):
        code, text = run(group, "--help")
        assert code == 0 and all(f" {command} " in text for command in commands), text


def test_a_command_runs_and_an_unknown_one_is_refused() -> None:
    code, text = run("key", "new")
    assert code == 0 and len(text.strip()) > 20
    code, text = run("cache", "nothing")
    assert code == 2 and "No such command 'nothing'" in text
