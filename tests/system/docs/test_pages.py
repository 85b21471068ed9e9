"""Pages of docs/, the README and the Python client's: their Python and their marked commands run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from icehouse_server.rpc.access.caller import Role
from icehouse_server.rpc.access.tokens import line_of, new_token

from docs import picture
from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.adapters import tiny_adapter_dir
from tests.fixtures.models.chat_templates import REMEMBERING, TOOL_CALL
from tests.fixtures.models.vision import tiny_vision_dir
from tests.fixtures.pages import CLIENT_PAGE, SHOWN_ADDRESS, Block, blocks_of, program_of
from tests.fixtures.rpc.authority import Authority
from tests.system.crash.server_process import ServerProcess
from tests.system.mesh.envoy import free_ports
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]

BOUND_S = 600.0

PAGES = [ROOT / "README.md", CLIENT_PAGE, *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {page: [block for block in blocks_of(page) if block.is_run] for page in PAGES}
RUN = {page: blocks for page, blocks in RUN.items() if blocks}
SEEN = {page: [block for block in blocks_of(page) if block.mark == "run: vision"] for page in PAGES}
SEEN = {page: blocks for page, blocks in SEEN.items() if blocks}
HAS_VISION = importlib.util.find_spec("mlx_vlm") is not None

SERVERS = {"tools.md": "calling", "tenants.md": "secured"}
"""Which server a page's calls are answered by, where it is not the plain one."""

EXPECTED: Mapping[str, tuple[str, ...]] = {
    "README.md": (r"(\d+) of \d+ prompt tokens",),
    "clients/python/README.md": (
        r"-- [1-9]\d* of \d+ prompt tokens were cached",
        r"[1-9]\d* prompt tokens came from the cache",
        r"\n36\n(yes|no)\nAda 37\n",
        "NOT_FOUND MODEL_NOT_FOUND",
    ),
    "start.md": (r"\d+ of \d+ prompt tokens were cached",),
    "chat.md": (r"-- [1-9]\d+ of \d+ prompt tokens cached", r"\bmessages\n", r"\nTrue\n"),
    "tools.md": (r"get_weather \{'city': 'Oslo'\}", r"call 0 get_weather", r"\b0\n"),
    "json.md": (
        r"(mathematician|programmer|other)\n",
        r"(mathematician|programmer|other) Person\n",
        r"the output ended with LENGTH before it was complete '",
        r"(yes|no)\n",
        r"\d{4}-\d\d-\d\d\n",
        "RESPONSE_FORMAT_INVALID",
    ),
    "rag.md": (r"4 vectors of \d+", r"0\.\d{3} "),
    "adapters.md": (r"False\nADAPTER_NOT_FOUND", '"poetry"'),
    "shared-prefix.md": (r"[1-9]\d+ of \d+ from the cache", r"[1-9]\d+ of \d+ from the handbook's"),
    "tenants.md": ("OPERATOR_ONLY", "BEGIN CERTIFICATE|icehouse|tenant"),
    "cache.md": (r"[1-9]\d* tokens from RAM",),
    "prefill.md": (r"NO_MATCH|DIVERGED", r"NONE|DIVERGED"),
    "openai.md": ("did you mean 'max_output_tokens'",),
    "agents.md": (),
}
"""What a page's output must have."""

EXPECTED_OF_IMAGES: Mapping[str, tuple[str, ...]] = {
    "README.md": (r"-- [1-9]\d* tokens of image",),
    "images.md": (r"tokens of image, [1-9]\d* of \d+ cached", r"[1-9]\d* from RAM"),
}
"""The same of what shows images."""

SCRIPT = TOOL_CALL[3:]
"""Without its thoughts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A server as pages call it, and the files that callers of it have."""

    address: str
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Place]]:
    folder = tmp_path_factory.mktemp("pages")
    model = tiny_model_dir(folder, "llama")
    adapters = ",".join(
        f"{name}={tiny_adapter_dir(folder, model, seed=seed, name=name)}"
        for seed, name in enumerate(("poetry", "legal"), 1)
    )
    calling = chain_model_dir(folder / "calling", REMEMBERING, SCRIPT, first="Ċ")
    authority, token = Authority(), new_token()
    certificate, key = authority.write_server(folder)
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(line_of(token, tenant="search", role=Role.TENANT, expire_date=None) + "\n")
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--token-file", str(tokens))

    with contextlib.ExitStack() as stack:

        def start(name: str, served: Path, *options: str, is_secured: bool = False) -> str:
            (port,) = free_ports(1)
            blocks, log = folder / f"{name}-blocks", folder / f"{name}.log"
            small = ("--block-token-count", "16", "--min-prefix-token-count", "0", *options)
            server = ServerProcess(model=served, directory=blocks, log=log, options=small, port=port)
            stack.enter_context(server)
            server.wait_until_serving(grpc.ssl_channel_credentials(authority.pem) if is_secured else None)
            return f"localhost:{port}"

        callers = {"server.pem": authority.pem, "token": f"{token}\n".encode()}
        yield {
            "plain": Place(start("plain", model, "--adapters", adapters)),
            "calling": Place(start("calling", calling)),
            "secured": Place(start("secured", model, *tls, is_secured=True), callers),
            **({"seeing": Place(start("seeing", tiny_vision_dir(folder)))} if HAS_VISION else {}),
        }


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder to run in, with `icehouse` on the path."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "icehouse"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m icehouse_server.cli.main "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.fixture
def checkout(desk: Path) -> Path:
    """The same with the picture where it is in a checkout."""
    path = desk / picture.PATH.relative_to(ROOT)
    path.parent.mkdir(parents=True)
    shutil.copy(picture.PATH, path)
    return desk


def test_every_page_with_code_has_what_its_output_must_have() -> None:
    assert {name_of(page) for page in RUN} >= set(EXPECTED) - {"README.md", "agents.md"}


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_runs(page: Path, places: Mapping[str, Place], desk: Path) -> None:
    place = places[SERVERS.get(page.name, "plain")]
    python = [block for block in RUN[page] if block.language == "python"]
    output = "".join(output_of(block, place, desk) for block in RUN[page] if block.language == "sh")
    for name, content in place.files.items():
        (desk / name).write_bytes(content)
    if python:
        program = program_of(python, place.address, calling=places["calling"].address)
        output += run([sys.executable, "-W", "error", "-c", program], place, desk)
    for pattern in EXPECTED.get(name_of(page), ()):
        assert re.search(pattern, output), f"{pattern!r} is not in what {page.name} prints:\n{output[-3000:]}"


@pytest.mark.skipif(not HAS_VISION, reason="the extra `vision` is not installed")
@pytest.mark.parametrize("page", SEEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_shows_of_images_runs(page: Path, places: Mapping[str, Place], checkout: Path) -> None:
    place = places["seeing"]
    python = program_of([block for block in SEEN[page] if block.language == "python"], place.address)
    output = run([sys.executable, "-W", "error", "-c", python], place, checkout)
    for block in SEEN[page]:
        if block.language == "sh" and "grpcurl" not in block.text:
            output += output_of(block, place, checkout)
    for pattern in EXPECTED_OF_IMAGES[page.name]:
        assert re.search(pattern, output), f"{pattern!r} is not in what {page.name} prints:\n{output[-3000:]}"


@pytest.mark.skipif(not HAS_VISION, reason="the extra `vision` is not installed")
@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not on the path")
@pytest.mark.parametrize("page", SEEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_calls_by_hand_with_images_are_answered(
    page: Path, places: Mapping[str, Place], checkout: Path
) -> None:
    place = places["seeing"]
    calls = [block for block in SEEN[page] if "grpcurl" in block.text]
    assert calls, f"{page.name} shows no call by hand"
    for block in calls:
        shown = dataclasses.replace(block, text=block.text.replace(SHOWN_ADDRESS, place.address))
        answer = output_of(shown, place, checkout)
        assert re.search(r'"image_?[tT]okens": [1-9]', answer), answer


def output_of(block: Block, place: Place, desk: Path) -> str:
    """Run a block of shell commands, which ends at the first that fails."""
    return run(["bash", "-euo", "pipefail", "-c", block.text], place, desk)


def name_of(page: Path) -> str:
    """Return what a page is known by here."""
    return page.relative_to(ROOT).as_posix() if page == CLIENT_PAGE else page.name


def run(command: list[str], place: Place, desk: Path) -> str:
    """Run a command and return what it prints; fails with all of it when the command does."""
    environment = {
        **os.environ,
        "PATH": f"{desk / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / part) for part in ("service", "gen/python", "clients/python/src")
        ),
        "ICEHOUSE_CLIENT_ADDRESS": place.address,
    }
    done = subprocess.run(
        command, cwd=desk, env=environment, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
