"""Archives with the Python client and at the terminal: between servers, and out of a directory."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from icehouse_client import AsyncClient, Client, IcehouseClientError
from icehouse_server.cli.main import app
from typer.testing import CliRunner

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.terminal import invoke
from tests.fixtures.whole_server import whole_server
from tests.system.cache.test_reuse import prompt

TOKENS = prompt(5 * 16 + 3)
SETTINGS: dict[str, Any] = {
    "cache__block_token_count": 16,
    "cache__min_prefix_token_count": 0,
    "cache__restore_or_recompute": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


def serving(model: Path, directory: Path) -> Any:
    return whole_server(model, directory, **SETTINGS)


async def test_the_python_client_moves_a_prompt(tmp_path: Path, model: Path) -> None:
    file, counts = tmp_path / "prompt.icehouse", list[int]()
    async with serving(model, tmp_path / "a") as served:
        address = served.served.rpc.address

        def use() -> Any:
            with Client(address) as client:
                client.cache.warm(TOKENS)
                done = client.cache.export_archive(file, TOKENS, on_progress=counts.append)
                with pytest.raises(IcehouseClientError, match="nothing of it is cached"):
                    client.cache.export_archive(tmp_path / "none", tenant="nobody")
                return done

        done = await asyncio.to_thread(use)
        assert done.block_count >= 5 and counts[-1] == file.stat().st_size
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert not list(tmp_path.glob("none*"))
    async with serving(model, tmp_path / "b") as served:
        async with AsyncClient(served.served.rpc.address) as client:
            answer = await client.cache.import_archive(file, on_progress=counts.append)
            assert answer.adopted_block_count == done.block_count and not answer.refusals
            assert counts[-1] == file.stat().st_size
            assert (await client.cache.explain(TOKENS)).cache.cached_tokens >= 80
            copy = io.BytesIO()
            assert (await client.cache.export_archive(copy)).block_count == done.block_count

        def back() -> Any:
            with Client(served.served.rpc.address) as client:
                return client.cache.import_archive(io.BytesIO(copy.getvalue()), tenant="blue")

        assert (await asyncio.to_thread(back)).adopted_block_count == done.block_count


async def test_the_terminal_moves_a_prompt(tmp_path: Path, model: Path) -> None:
    file, ids = str(tmp_path / "prompt.icehouse"), ",".join(map(str, TOKENS))
    async with serving(model, tmp_path / "a") as served:
        address = ("--address", served.served.rpc.address)
        await invoke("warm", "--tokens", ids, *address)
        told = await invoke("export", "--tokens", ids, "--to", file, *address)
        assert told.exit_code == 0 and told.stdout.startswith("exported: "), told.output
        both = await invoke("export", "--tokens", ids, "--all", "--to", file, *address)
        nowhere = await invoke("export", "--all", "--to", str(tmp_path / "no" / "x"), *address)
        assert both.exit_code == 2 and nowhere.exception is not None
    async with serving(model, tmp_path / "b") as served:
        address = ("--address", served.served.rpc.address)
        told = await invoke("import", file, *address)
        assert told.exit_code == 0 and "adopted: " in told.stdout, told.output
        facts = json.loads((await invoke("import", file, "--json", *address)).stdout)
        assert facts["adopted_block_count"] == "0" and int(facts["known_block_count"]) >= 5
        os.truncate(file, os.path.getsize(file) // 2)
        cut = await invoke("import", file, "--tenant", "blue", *address)
        assert cut.exit_code == 1 and "ends too early" in cut.stderr


def run(*words: str, input: bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(words), input=input)


async def test_a_directory_is_exported_and_copied_and_its_archive_goes_to_a_server(
    tmp_path: Path, model: Path
) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    file = str(tmp_path / "all.icehouse")
    async with serving(model, Path(a)) as served, AsyncClient(served.served.rpc.address) as client:
        await client.cache.warm(TOKENS)
    told = run("cache", "export", a, file)
    assert told.exit_code == 0 and "blocks written" in told.stdout, told.output
    piped = run("cache", "export", a, "-")
    assert piped.stdout_bytes == Path(file).read_bytes()
    told = run("cache", "import", b, "-", "--json", input=piped.stdout_bytes)
    facts = json.loads(told.stdout)
    assert told.exit_code == 0 and facts["adopted"] >= 5 and facts["refused"] == {}
    told = run("cache", "copy", b, c)
    assert told.exit_code == 0 and f"{facts['adopted']} blocks adopted" in told.stdout, told.output
    assert run("cache", "copy", c, c).exit_code != 0
    assert run("cache", "export", str(tmp_path / "none"), file).exit_code != 0
    os.truncate(file, os.path.getsize(file) - 1)
    cut = run("cache", "import", c, file)
    assert cut.exit_code == 1 and "ends too early" in cut.stderr
    async with serving(model, Path(c)) as served, AsyncClient(served.served.rpc.address) as client:
        assert (await client.cache.explain(TOKENS)).cache.ssd_tokens >= 80
        # A directory's archive does not name the tenant: its root says whose it is.
        answer = await client.cache.import_archive(io.BytesIO(piped.stdout_bytes))
        assert answer.known_block_count == facts["adopted"] and not answer.refusals
