"""A whole server with a key: started, filled, restarted, given another key, and looked into from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_server.bootstrap.encryption import new_key_text
from icehouse_server.cli.main import app
from icehouse_server.errors import IcehouseError, Reason, StartError
from typer.testing import CliRunner

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.whole_server import whole_server

_SETTINGS = {"cache__block_token_count": 16, "cache__min_prefix_token_count": 0}
_TEXT = "Once upon a time there was a lighthouse. " * 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model_dir(tmp_path, "llama")


def new_key(folder: Path, name: str = "key") -> str:
    path = folder / name
    path.write_text(new_key_text())
    path.chmod(0o600)
    return str(path)


async def ask(model: Path, directory: Path, **settings: object) -> tuple[str, int, pb.CacheStatsResponse]:
    """Start a server, ask once, stop it; return the text, the tokens it had from SSD, and the counters."""
    async with whole_server(model, directory, **_SETTINGS, **settings) as served:
        answer = await served.inference.Generate(
            pb.GenerateRequest(prompt={"text": _TEXT}, max_output_tokens=4)
        )
        stats = await served.inference.CacheStats(pb.CacheStatsRequest())
    return answer.text, answer.usage.ssd_tokens, stats


def run(*arguments: str, **environ: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={**environ}, catch_exceptions=True)
    told = done.exception.message if isinstance(done.exception, IcehouseError) else ""
    return done.exit_code, f"{done.output}{told}"


async def test_a_key_keeps_the_cache_warm_and_the_disk_unreadable(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, key = tmp_path / "blocks", new_key(tmp_path)
    clear_text, _, stats = await ask(model, tmp_path / "clear")
    assert not stats.cache.disk.encrypted
    text, ssd_tokens, stats = await ask(model, directory, cache__key_file=key)
    assert stats.cache.disk.encrypted and (text, ssd_tokens) == (clear_text, 0)
    text, ssd_tokens, stats = await ask(model, directory, cache__key_file=key)
    assert text == clear_text and ssd_tokens > 32
    assert stats.cache.integrity.seal_failure_total == 0
    with caplog.at_level("WARNING"):
        text, ssd_tokens, stats = await ask(model, directory, cache__key_file=new_key(tmp_path, "other"))
    assert (text, ssd_tokens) == (clear_text, 0) and stats.cache.disk.other_model_block_count > 3
    assert [record.message for record in caplog.records].count("cache_key_unknown") == 1
    text, ssd_tokens, _ = await ask(model, directory, cache__key_file=key)
    assert text == clear_text and ssd_tokens > 32, "the other key's server took them away"


async def test_a_changed_key_opens_what_the_old_one_did(tmp_path: Path, model: Path) -> None:
    directory, old, new = tmp_path / "blocks", new_key(tmp_path, "old"), new_key(tmp_path, "new")
    await ask(model, directory, cache__key_file=old)
    where = ("--cache-directory", str(directory))
    code, said = run("key", "change", *where, "--cache-key-file", old, "--new-key-command", f"cat {new}")
    assert code == 0 and "the new key opens" in said
    _, ssd_tokens, _ = await ask(model, directory, cache__key_command=f"cat {new}")
    assert ssd_tokens > 32
    code, said = run("key", "change", *where, "--cache-key-file", old, "--new-key-file", new)
    assert code == 1 and "nothing was changed" in said


async def test_the_cache_commands_see_outlines_without_the_key_and_tokens_with_it(
    tmp_path: Path, model: Path
) -> None:
    directory, key = tmp_path / "blocks", new_key(tmp_path)
    await ask(model, directory, cache__key_file=key)
    where = ("--cache-directory", str(directory))
    code, said = run("cache", "ls", *where)
    assert code == 0 and "encrypted" in said
    name = next(directory.rglob("*.safetensors")).stem
    assert run("cache", "check", *where)[0] == 0 == run("cache", "verify", *where)[0]
    code, said = run("cache", "inspect", name, "--show-tokens", *where)
    assert code == 0 and "token_ids" not in said and "encryption_key" in said
    code, said = run("cache", "inspect", name, "--show-tokens", *where, ICEHOUSE_CACHE_KEY_FILE=key)
    assert code == 0 and "token_ids" in said
    code, said = run("doctor", *where, "--cache-key-file", key)
    assert "blocks are encrypted (AES-256-GCM), data key" in said
    code, said = run("doctor", *where, "--cache-key-file", new_key(tmp_path, "other"))
    assert "opens no data key" in said
    code, said = run("cache", "purge", "--all", "--yes", *where)
    assert code == 0 and not (directory / "keys.json").exists()


async def test_a_server_in_use_keeps_its_keys(tmp_path: Path, model: Path) -> None:
    directory, key = tmp_path / "blocks", new_key(tmp_path)
    async with whole_server(model, directory, **_SETTINGS, cache__key_file=key):
        with pytest.raises(StartError) as caught:
            await ask(model, directory, cache__key_file=key)
    assert caught.value.reason is Reason.STORE_LOCKED
