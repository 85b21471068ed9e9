"""What a caller may hear when things go wrong: never a path, a prompt or the insides of the program."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import cache_service_pb2, inference_service_pb2, model_service_pb2
from icehouse_client.log_lines import JsonFormatter
from icehouse_server.domain.model import EngineState
from icehouse_server.errors import Reason
from icehouse_server.storage.local.directory.manifest import Manifest

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.whole_server import WholeServer, whole_server

_MARK = "hush"
"""Part of every prompt."""
_BLOCK = 16
_TEXT = f"{_MARK} Once upon a time " * 8
_INSIDES = ("Traceback", "Error(", ".py", "object at 0x", "site-packages")

Request = inference_service_pb2.GenerateRequest


def wrong_calls(served: WholeServer) -> Iterator[tuple[Any, Any]]:
    """Every RPC with what it takes, and with something it refuses."""
    generate, cache = served.inference.Generate, served.cache
    yield generate, Request(prompt={"text": _TEXT}, max_output_tokens=2)
    yield generate, Request(prompt={"text": _TEXT}, model=f"/{_MARK}")
    yield generate, Request(prompt={"text": _TEXT}, max_output_tokens=-1)
    yield generate, Request(prompt={"text": _TEXT}, stop=[""])
    yield generate, Request(prompt={"text": _TEXT * 1000})
    yield generate, Request(prompt={"tokens": {"ids": [1 << 30]}})
    yield generate, Request(prompt={"chat": {"messages": [{"role_name": "user", "content": _TEXT}]}})
    yield generate, Request(prompt={"chat": {"messages": [{"role": "ROLE_USER", "content": _TEXT}] * 2}})
    yield generate, Request()
    yield served.inference.Tokenize, inference_service_pb2.TokenizeRequest()
    yield served.inference.CacheStats, inference_service_pb2.CacheStatsRequest()
    yield cache.Explain, cache_service_pb2.ExplainRequest(prompt={"text": _TEXT})
    yield reading(cache.Warm), cache_service_pb2.WarmRequest(prompt={"text": _TEXT})
    yield cache.Pin, cache_service_pb2.PinRequest(prompt={"text": f"{_MARK} never seen"})
    yield cache.Pin, cache_service_pb2.PinRequest(prompt={"text": _TEXT})
    yield reading(cache.Verify), cache_service_pb2.VerifyRequest()
    yield reading(cache.Evict), cache_service_pb2.EvictRequest(prompt={"text": _TEXT})
    yield served.models.ListModels, model_service_pb2.ListModelsRequest(page_token=_MARK)
    yield served.models.GetModel, model_service_pb2.GetModelRequest()
    yield reading(served.models.LoadModel), model_service_pb2.LoadModelRequest(model=_MARK)
    yield served.models.UnloadModel, model_service_pb2.UnloadModelRequest()


def reading(method: Any) -> Any:
    """Return a call of a stream that reads all of it."""

    async def read(request: Any, **options: Any) -> list[Any]:
        return [response async for response in method(request, **options)]

    return read


async def answer(method: Any, request: Any) -> tuple[bool, str]:
    """Return whether a call was refused, and all its caller gets to see."""
    try:
        return False, str(await method(request, timeout=BOUND_S))
    except grpc.aio.AioRpcError as error:
        trailers = json.dumps([(name, str(value)) for name, value in error.trailing_metadata() or ()])
        return True, f"{error.details()} {trailers}"


async def told(served: WholeServer) -> tuple[int, list[str]]:
    """Make every call; return how many were refused and what was said."""
    answers = [await answer(method, request) for method, request in wrong_calls(served)]
    return sum(is_refused for is_refused, _ in answers), [text for _, text in answers]


async def told_of_a_disk_given_up(served: WholeServer) -> tuple[Any, list[str]]:
    """Make calls until the disk is given up before and behind them: it is tried again from time to time.

    Return the counters and what was said.
    """
    async with asyncio.timeout(BOUND_S):
        while True:
            for _ in range(2):
                await served.inference.Generate(Request(prompt={"text": _TEXT}, max_output_tokens=2))
            _, answers = await told(served)
            stats = await served.inference.CacheStats(inference_service_pb2.CacheStatsRequest())
            is_refused = any(Reason.STORE_UNUSABLE in text for text in answers)
            if is_refused and stats.cache.disk.writes_off_detail:
                return stats, answers


def written(caplog: pytest.LogCaptureFixture) -> str:
    """Return the log with every field, as the server writes it for machines."""
    return "\n".join(map(JsonFormatter().format, caplog.records))


def assert_discreet(answers: list[str], folder: Path) -> None:
    for text in answers:
        assert str(folder) not in text and folder.name not in text
        assert not any(inside in text for inside in _INSIDES), text


async def test_a_caller_sees_no_path_in_any_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    settings = {"cache__block_token_count": _BLOCK, "cache__min_prefix_token_count": 0}
    with caplog.at_level("DEBUG"):
        async with whole_server(folder, tmp_path / "blocks", **settings) as served:
            refused_count, answers = await told(served)
        assert refused_count >= 8
        assert_discreet(answers, tmp_path)
    assert caplog.records and _MARK not in written(caplog), "a prompt is in the log"


@pytest.mark.parametrize("loss", ["directory", "manifest"])
async def test_a_disk_that_fails_is_told_without_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise sqlite3.OperationalError(f"unable to open database file {blocks}")

    folder, blocks = tiny_model_dir(tmp_path, "llama"), tmp_path / "blocks"
    settings = {"cache__block_token_count": _BLOCK, "cache__min_prefix_token_count": 0}
    with caplog.at_level("WARNING"):
        async with whole_server(folder, blocks, cache__spill_policy="write_behind", **settings) as served:
            if loss == "directory":
                shutil.rmtree(blocks)
                blocks.write_text("a file is in its place")
            else:
                monkeypatch.setattr(Manifest, "insert", refuse)
            stats, answers = await told_of_a_disk_given_up(served)
    assert "nothing is written until" in stats.cache.disk.writes_off_detail
    assert_discreet([*answers, str(stats)], tmp_path)
    assert str(blocks) in written(caplog), "the log does not say where"


async def test_a_model_that_does_not_load_is_told_without_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    async with whole_server(folder, tmp_path / "blocks", until=EngineState.FAILED) as served:
        refused_count, answers = await told(served)
        assert str(folder) in served.served.only.engine.error.message, "whoever starts it must see where"
    assert refused_count == len(answers)
    assert_discreet(answers, tmp_path)
    assert str(folder) in written(caplog)
