"""A user's first day: wheels, plain pip, one command and the page's settings, and Codex mends a file.

Everything is new: environment, home, cache directory. The model's script comes from a folder beside all of it
(`script_plugin`); what is installed is what a release has.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_client import Client
from icehouse_server.cli.local.child_server import free_port, wait_until_serving

from tests.fixtures.patience import BOUND_S
from tests.fixtures.user_install import build_wheels, install
from tests.system.agents.conftest import RIGHT, WRONG, Desk
from tests.system.agents.script_plugin import write_script_plugin
from tests.system.agents.scripted_model import write_scripted_model
from tests.system.agents.test_programs import (
    AGAIN,
    DONE,
    LEAST_REUSED,
    Installed,
    codex_steps,
    configure_codex,
    documents,
)

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Install the wheels, and serve a scripted model with the installed command and HTTP."""
    environment = install(build_wheels(tmp_path / "release"), tmp_path / "venv")
    model, work, home = write_scripted_model(tmp_path / "model"), tmp_path / "work", tmp_path / "user"
    work.mkdir()
    home.mkdir()
    (work / "greet.py").write_text(WRONG, encoding="utf-8")
    plugin = write_script_plugin(tmp_path / "plugin", model=model, steps=codex_steps(work / "greet.py"))
    # Nothing of a developer's: neither variables nor programs of this environment.
    variables = {"PATH": os.defpath, "HOME": str(home), "LANG": "C.UTF-8", "PYTHONPATH": str(plugin)}
    port, http_port = free_port(), free_port()
    command = [str(environment / "bin" / "icehouse"), "serve", str(model), "--http-port", str(http_port)]
    # The ports of a machine that tests share; and a model as small as this would rather compute than read.
    command += ["--port", str(port), "--no-restore-or-recompute"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, cwd=work, env=variables, stdout=file, stderr=file)
    try:
        with Client(f"127.0.0.1:{port}") as client:
            assert wait_until_serving(client, is_alive=lambda: server.poll() is None), log.read_text()
        yield Desk(work, f"http://127.0.0.1:{http_port}", log)
    finally:
        server.terminate()
        server.wait(BOUND_S)


async def test_codex_mends_a_file_with_what_pip_installed(desk: Desk, installed: Installed) -> None:
    codex = installed("codex")
    configure_codex(codex, desk)
    told = documents(await desk.run(codex, "Codex CLI"))
    assert desk.file.read_text(encoding="utf-8") == RIGHT, desk.log.read_text()
    said = [item["item"] for item in told if item["type"] == "item.completed"]
    assert [item["text"].strip() for item in said if item["type"] == "agent_message"] == [DONE, AGAIN.said]
    # What Codex says of a session is the sum of its turns. All of the second but what is new was there.
    first, both = [event["usage"] for event in told if event["type"] == "turn.completed"]
    assert 0 < first["cached_input_tokens"] < first["input_tokens"]
    cached, whole = (both[key] - first[key] for key in ("cached_input_tokens", "input_tokens"))
    assert cached > LEAST_REUSED * whole, (first, both)
    assert not re.search(r"error|warning: ", desk.log.read_text())
