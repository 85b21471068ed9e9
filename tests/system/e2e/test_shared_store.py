"""Two servers as they are composed, and a real store between them: an S3 server, or a folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import cache_stats_pb2, prompt_pb2, server_service_pb2
from icehouse.v1 import inference_service_pb2 as pb
from icehouse_server.bootstrap.encryption import new_key_text

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.stubs import Stubs
from tests.fixtures.storage.s3_server import S3Server
from tests.system.cache.test_reuse import prompt
from tests.system.crash.crashing_server import ServerProcess

pytest.importorskip("obstore", reason="obstore comes with the extra shared")

BLOCK = 16
TOKENS = prompt(20 * BLOCK + 3)
OPTIONS = ("--block-token-count", str(BLOCK), "--min-prefix-token-count", "0")
_POLL_S = 0.01


@dataclasses.dataclass
class Served(Stubs):
    """A server in a process of its own, and a channel to it."""

    channel: Any
    process: ServerProcess


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(params=["S3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "S3":
        return request.getfixturevalue("s3").url
    (tmp_path / "shared").mkdir()
    return f"file://{tmp_path}/shared"


@contextlib.asynccontextmanager
async def served_at(model: Path, directory: Path, url: str, *options: str) -> AsyncIterator[Served]:
    """A process of its own, with the environment that this one has now."""
    with ServerProcess(
        model=model,
        directory=directory,
        log=directory.with_suffix(".log"),
        # A machine that is busy with other tests answers late.
        options=(*OPTIONS, "--shared-lookup-timeout-ms", "2000", "--shared-url", url, *options),
        break_it=partial(set_variables, {k: v for k, v in os.environ.items() if k.startswith("AWS_")}),
    ) as process:
        process.wait_until_serving()
        async with grpc.aio.insecure_channel(process.address) as channel:
            yield Served(channel, process)


def set_variables(values: dict[str, str]) -> None:
    os.environ.update(values)


async def ask(server: Stubs, tokens: list[int] = TOKENS) -> pb.GenerateResponse:
    request = pb.GenerateRequest(prompt={"tokens": prompt_pb2.TokenPrompt(ids=tokens)}, max_output_tokens=8)
    return await server.inference.Generate(request, timeout=BOUND_S)


async def shared(server: Stubs) -> cache_stats_pb2.CacheSharedStats:
    return (await server.serving.GetStats(server_service_pb2.GetStatsRequest())).stats.cache.shared


async def until_stored(server: Stubs, count: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await shared(server)).stored_block_total < count:
            await asyncio.sleep(_POLL_S)


@pytest.mark.parametrize("has_key", [False, True], ids=["in the clear", "under a key"])
async def test_a_second_server_begins_where_the_first_one_was(model, tmp_path, url, has_key) -> None:
    options: tuple[str, ...] = ()
    if has_key:
        (tmp_path / "key").write_text(new_key_text())
        (tmp_path / "key").chmod(0o600)
        options = ("--cache-key-file", str(tmp_path / "key"))
    async with served_at(model, tmp_path / "a", url, *options) as first:
        said = await ask(first)
        await until_stored(first, 20)
        async with served_at(model, tmp_path / "b", url, *options) as second:
            again = await ask(second)
            assert again.token_ids == said.token_ids
            assert again.cache.ssd_tokens == 20 * BLOCK
            stats = await shared(second)
            assert (stats.hit_total, stats.fetched_block_total, stats.refused_block_total) == (1, 20, 0)
    async with served_at(model, tmp_path / "b", url, *options) as restarted:
        assert (await ask(restarted)).cache.ssd_tokens == 20 * BLOCK


async def test_a_store_that_is_down_at_the_start_costs_nothing_but_its_blocks(model, tmp_path, s3) -> None:
    s3.stop()
    async with served_at(model, tmp_path / "a", s3.url) as served:
        said = await ask(served)
        assert said.cache.ssd_tokens == 0
        assert (await shared(served)).failure_total > 0
        with s3:
            # It is offered again as it is used; after the pauses it gets there.
            async with asyncio.timeout(BOUND_S):
                while (await shared(served)).stored_block_total < 20:
                    await ask(served)
                    await asyncio.sleep(_POLL_S)
            async with served_at(model, tmp_path / "b", s3.url) as second:
                assert (await ask(second)).token_ids == said.token_ids


async def test_a_writer_that_is_killed_leaves_whole_blocks_or_none(model, tmp_path, s3) -> None:
    async with served_at(model, tmp_path / "a", s3.url) as writer:
        said = await ask(writer)
        async with asyncio.timeout(BOUND_S):
            while not any(s3.objects.rglob("*")):
                await asyncio.sleep(_POLL_S)
        writer.process.kill()
    async with served_at(model, tmp_path / "b", s3.url) as reader:
        again = await ask(reader)
        assert again.token_ids == said.token_ids
        stats = await shared(reader)
        assert again.cache.ssd_tokens == stats.fetched_block_total * BLOCK
    async with served_at(model, tmp_path / "a", s3.url) as restarted:
        async with asyncio.timeout(BOUND_S):
            # What it had written it stores now, unless it is there; what it had not it fetches or computes.
            done_count = 0
            while done_count < 20:
                assert (await ask(restarted)).token_ids == said.token_ids
                stats = await shared(restarted)
                done_count = stats.stored_block_total + stats.known_block_total + stats.fetched_block_total


async def test_other_keys_and_models_have_other_names(model, tmp_path, s3) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(new_key_text())
        (tmp_path / name).chmod(0o600)
    async with served_at(model, tmp_path / "a", s3.url, "--cache-key-file", str(tmp_path / "one")) as first:
        await ask(first)
        await until_stored(first, 20)
    for number, options in enumerate(((), ("--cache-key-file", str(tmp_path / "two")))):
        async with served_at(model, tmp_path / f"b{number}", s3.url, *options) as other:
            assert (await ask(other)).cache.ssd_tokens == 0
            stats = await shared(other)
            assert (stats.lookup_total, stats.hit_total) == (1, 0)
            await until_stored(other, 20)
    text = b"".join(path.read_bytes() for path in s3.objects.rglob("*") if path.is_file())
    assert b"token_ids" in text, "the one without a key wrote in the clear"
