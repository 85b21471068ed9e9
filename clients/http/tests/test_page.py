"""Pages and the command: what they show is run, with the command as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from icehouse_http import command
from icehouse_http.settings import Settings

from clients.http.tests.fronts import HttpFront
from tests.fixtures.pages import SHOWN_ADDRESS, blocks_of
from tests.fixtures.patience import BOUND_S
from tests.system.mesh.envoy import free_ports
from tests.tidy.tree import ROOT

MARK = "run: http"
SHOWN_PORT = "8000"
OTHER_PAGES = [ROOT / "README.md", ROOT / "docs" / "from" / "openai.md"]


async def output_of(*arguments: str) -> str:
    """Return what a command writes; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(BOUND_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@contextlib.asynccontextmanager
async def started(arguments: list[str], url: str) -> AsyncIterator[None]:
    """Run the command until the block ends, once it answers."""
    program = (sys.executable, "-m", "icehouse_http.command", *arguments)
    process = await asyncio.create_subprocess_exec(*program, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(BOUND_S):
            while f"http_started url={url} " not in (line := (await process.stderr.readline()).decode()):
                assert line, "it has ended"
        yield
    finally:
        process.terminate()
        await process.communicate()


async def test_what_the_page_shows_runs(whole: HttpFront) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    blocks = [block for block in blocks_of(ROOT / "docs" / "http.md") if block.mark == MARK]
    (port,) = free_ports(1)
    shown = {SHOWN_ADDRESS: whole.address, SHOWN_PORT: str(port)}

    def told(text: str) -> str:
        for name, value in shown.items():
            text = text.replace(name, value)
        return text

    (serve, *calls), (program,) = blocks[0].commands, [block.text for block in blocks[1:]]
    name, *arguments = shlex.split(told(serve))
    assert name == "icehouse-http"
    url = f"http://127.0.0.1:{port}"
    async with started(arguments, url):
        models, chat = [await output_of(*shlex.split(told(call))) for call in calls]
        assert '"id":"tiny"' in models and '"finish_reason"' in chat
        assert "tokens came from the cache" in await output_of(sys.executable, "-c", told(program))
        async with httpx2.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).json() == {"status": "SERVING"}


@pytest.mark.parametrize("page", OTHER_PAGES, ids=lambda page: page.name)
async def test_what_other_pages_ask_is_answered(whole: HttpFront, page: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    blocks = [block for block in blocks_of(page) if block.mark == MARK]
    (port,) = free_ports(1)
    async with started(["--address", whole.address, "--port", str(port)], f"http://127.0.0.1:{port}"):
        for block in blocks:
            text = block.text.replace(SHOWN_PORT, str(port))
            program = (sys.executable, "-c", text) if block.language == "python" else ("sh", "-c", text)
            assert "error" not in (answer := await output_of(*program)) and answer.strip()


def test_options_become_settings(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"authority")
    options = "--address a:1 --alias x=y -a v=w --strict-models --temperature 0.5 --max-body-bytes 2000"
    options += " --body-memory-bytes 9000 --no-health-watch --no-access-log --host b --name c"
    options += f" --allow-origin http://a --allow-origin http://b --ca-file {tmp_path / 'ca.pem'}"
    parser = command._parser()
    assert command.settings_from(parser.parse_args(shlex.split(options))) == Settings(
        address="a:1",
        ca_pem=b"authority",
        aliases={"x": "y", "v": "w"},
        strict_models=True,
        temperature=0.5,
        allow_origins=("http://a", "http://b"),
        names=("b", "c"),
        max_body_bytes=2000,
        body_memory_bytes=9000,
        watches_health=False,
        has_access_log=False,
    )
    assert command.settings_from(parser.parse_args([])) == Settings(names=("127.0.0.1",))
    for wrong in ("x", "=y", "x="):
        with pytest.raises(SystemExit):
            parser.parse_args(["--alias", wrong])
