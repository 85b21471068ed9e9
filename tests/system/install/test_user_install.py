"""Installs of users: the wheels and what they need, in an empty environment. They are small, and serve."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from icehouse_client import Client, Message
from icehouse_server.cli.local.child_server import free_port, wait_until_serving
from icehouse_server.demo.models import SMOLLM2

from tests.fixtures.demo_models import demo_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.user_install import build_wheels, install, run, user_environ
from tests.tidy.test_dependencies import names
from tests.tidy.tree import ROOT

pytestmark = pytest.mark.slow

SIZE_LIMIT_BYTES = 350 << 20
COMPILED_LIMIT_BYTES = 445 << 20
"""With bytecode of everything, which pip makes unless it is told --no-compile: half of it is of transformers,
whose families of models are hardly ever imported."""

BROUGHT_BY_OTHERS = {"pydantic", "pyyaml", "requests"}
"""What the tests use too: huggingface-hub, mlx-lm and gguf bring them."""


def size_bytes(folder: Path, *, but: str = "") -> int:
    """Return what a folder takes on disk, without files that end with `but`."""
    files = [path for path in folder.rglob("*") if not (but and path.name.endswith(but))]
    return sum(path.lstat().st_blocks * 512 for path in files)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return our wheels, the server's last, built as for a release."""
    return build_wheels(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def environment(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new environment in which the wheels were installed."""
    return install(wheels, tmp_path_factory.mktemp("user") / "venv", "--no-compile")


@pytest.fixture(scope="module")
def served(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, list[str]]]:
    """Run `icehouse serve demo` of that environment; yield a client, and the server's options."""
    demo_model_dir(SMOLLM2)
    port = free_port()
    folder = tmp_path_factory.mktemp("cache")
    options = ["--port", str(port), "--cache-directory", str(folder / "blocks"), "--ssd-bytes", "1GiB"]
    with (folder / "log").open("wb") as log:
        command = [environment / "bin" / "icehouse", "serve", "demo", *options]
        server = subprocess.Popen(command, env=user_environ(), stderr=log)
    try:
        with Client(f"127.0.0.1:{port}") as client:
            is_serving = wait_until_serving(client, is_alive=lambda: server.poll() is None)
            assert is_serving, (folder / "log").read_text()
            yield client, options
    finally:
        server.terminate()
        server.wait(BOUND_S)


def test_nothing_of_development_is_there(environment: Path) -> None:
    listed = run([environment / "bin" / "python", "-m", "pip", "list", "--format", "json"])
    found = names([package["name"] for package in json.loads(listed)])
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"icehouse", "icehouse-client", "icehouse-http", "icehouse-protos", "mlx", "mlx-lm"} <= found
    extras = {name for extra in table["optional-dependencies"].values() for name in names(extra)}
    assert found & (extras - BROUGHT_BY_OTHERS - {"icehouse", "mlx"}) == set()


def test_it_serves_and_answers(environment: Path, served: tuple[Client, list[str]]) -> None:
    client, options = served
    reply = client.chat([Message("user", "What is the capital of France?")], max_output_tokens=8)
    assert "Paris" in reply.text
    # What the first start compiled is counted, too.
    (site,) = environment.glob("lib/python*/site-packages")
    assert size_bytes(site) <= SIZE_LIMIT_BYTES
    # Beside a healthy server all is well.
    run([environment / "bin" / "icehouse", "doctor", "--model", "demo", *options])


def test_bytecode_of_everything_is_within_a_bound(environment: Path) -> None:
    (site,) = environment.glob("lib/python*/site-packages")
    run([environment / "bin" / "python", "-m", "compileall", "-q", "-q", site])
    assert size_bytes(site) <= COMPILED_LIMIT_BYTES
    assert size_bytes(site, but=".pyc") <= SIZE_LIMIT_BYTES


def test_uv_installs_it_as_a_tool(wheels: list[Path], tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", tmp_path / "uv"])
    run([tmp_path / "uv" / "bin" / "pip", "install", "--quiet", "uv"])
    *others, server = wheels
    beside = [word for wheel in others for word in ("--with", str(wheel))]
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    uv: list[str | Path] = [tmp_path / "uv" / "bin" / "uv", "tool", "install", "--quiet", "--no-config"]
    run([*uv, "--python", sys.executable, *beside, server], **places)
    version = run([tmp_path / "bin" / "icehouse", "--version"]).strip()
    assert f"-{version}-" in server.name
    # The demo model is fetched with pip, which an environment of uv's has only where it is asked for.
    checks = json.loads(
        run([tmp_path / "bin" / "icehouse", "doctor", "--model", "demo", "--port", "0", "--json"])
    )
    assert {check["name"]: check["verdict"] for check in checks}["model"] == "ok"
