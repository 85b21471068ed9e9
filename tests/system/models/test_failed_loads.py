"""Models that cannot be loaded, asked for ten times in a row: each says why, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import mlx.core as mx
import pytest
from icehouse_server.pool import model_pool

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.worker import needs_protocol
from tests.system.models.pool_server import PoolServer, entry, pool_server, question
from tests.system.models.test_models import PROMPTS, size_of

_COUNT = 10
_OWN_THREADS = ("grammar", "inference", "storage-reader")


def _cut_weights(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])


def _lie_about_a_tensor(folder: Path) -> None:
    """Have the weights end before the last of them begins, in a file that is as long as it says."""
    (weights,) = folder.glob("*.safetensors")
    data = weights.read_bytes()
    head_bytes = 8 + int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:head_bytes].replace(b"layers.0", b"layers.9") + data[head_bytes:])


def _unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))


def _architectures_that_are_none(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": 7}))


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def _image_processor_gone(folder: Path) -> None:
    """It is found late: everything else of the model has been opened by then."""
    pytest.importorskip("mlx_vlm")
    from tests.fixtures.models.vision import tiny_vision_dir

    made = tiny_vision_dir(folder.parent, "qwen2_5_vl")
    (made / "preprocessor_config.json").write_text("[]")
    for file in folder.iterdir():
        file.unlink()
    for file in made.iterdir():
        file.rename(folder / file.name)


@pytest.mark.parametrize(
    "spoil",
    [
        _cut_weights,
        _lie_about_a_tensor,
        _unknown_type,
        _architectures_that_are_none,
        _no_tokenizer,
        _image_processor_gone,
    ],
)
async def test_a_model_that_cannot_be_loaded_says_why_each_time_and_harms_nobody(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "RETRY_S", 0.0)
    spoilt = tiny_model_dir(tmp_path, "llama", name="spoilt")
    spoil(spoilt)
    entries = [entry(tiny_model_dir(tmp_path, "qwen3")), entry(spoilt)]
    async with pool_server(tmp_path / "blocks", entries) as served:
        expected = await served.inference.Generate(question("qwen3", PROMPTS[0]))
        refusal = await refused(served.inference.Generate(question("spoilt", PROMPTS[0])))
        before = _held(served)
        for _ in range(_COUNT):
            again = await refused(served.inference.Generate(question("spoilt", PROMPTS[0])))
            assert (again.code, again.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_LOADED")
            assert again.message == refusal.message and str(tmp_path) not in again.message
            assert again.info.metadata["cause"] == "MODEL_INVALID"
            answer = await served.inference.Generate(question("qwen3", PROMPTS[0]))
            assert list(answer.token_ids) == list(expected.token_ids)
        await _check_nothing_left(served, before, tmp_path / "qwen3")


@needs_protocol
async def test_a_model_that_lies_to_gateways_leaves_nothing_behind_and_is_loaded_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "RETRY_S", 0.0)
    liar = tiny_model_dir(tmp_path, "llama", name="liar")
    # More than any float: it is the last that is read of a model's files before its engine starts.
    (liar / "generation_config.json").write_text(json.dumps({"temperature": 10**400}))
    entries = [entry(tiny_model_dir(tmp_path, "qwen3")), entry(liar)]
    async with pool_server(tmp_path / "blocks", entries, fleet__worker_enabled=True) as served:
        before = _held(served)
        for _ in range(_COUNT):
            refusal = await refused(served.inference.Generate(question("liar", PROMPTS[0])))
            assert refusal.info.metadata["cause"] == "ENGINE_FAILED"
        await _check_nothing_left(served, before, tmp_path / "qwen3")
        (liar / "generation_config.json").unlink()
        assert (await served.inference.Generate(question("liar", PROMPTS[0]))).token_ids


async def test_a_model_that_is_too_large_is_refused_each_time_and_harms_nobody(tmp_path: Path) -> None:
    large = tiny_model_dir(tmp_path, "llama", name="large", hidden_size=256)
    small = tiny_model_dir(tmp_path, "qwen3")
    limit_bytes = size_of(large) - 1
    entries = [entry(small), entry(large)]
    async with pool_server(tmp_path / "blocks", entries) as served:
        served.pool._limit_bytes = limit_bytes
        before = _held(served)
        for _ in range(_COUNT):
            refusal = await refused(served.inference.Generate(question("large", PROMPTS[0])))
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "MEMORY_NEVER_FITS",
            )
            assert refusal.info.metadata["weight_bytes"] == str(size_of(large))
            assert refusal.info.metadata["limit_bytes"] == str(limit_bytes)
            assert (await served.states())["qwen3"] == "MODEL_STATE_READY"
        await _check_nothing_left(served, before, small)


class _Held(NamedTuple):
    """What a failed load could leave behind."""

    threads: Counter[str]
    models: list[object]
    """Of the SSD tier."""
    share_count: int
    memory_bytes: int


async def _check_nothing_left(served: PoolServer, before: _Held, folder: Path) -> None:
    # What was told to end takes a moment. Of the threads before the loads one may have been about to.
    async with asyncio.timeout(BOUND_S):
        while (now := _held(served)).threads - before.threads or now.models != before.models:
            await asyncio.sleep(0)
    assert now.share_count == before.share_count
    # What the other model keeps of its answers is less than a model.
    assert now.memory_bytes < before.memory_bytes + size_of(folder) // 2


def _held(served: PoolServer) -> _Held:
    opener: Any = served.pool._opener
    tiers, parts = served.served.tiers, opener._parts
    assert tiers is not None
    names = Counter(thread.name for thread in threading.enumerate())
    threads = Counter({name: count for name, count in names.items() if name.startswith(_OWN_THREADS)})
    return _Held(threads, [*tiers._loop.models], len(parts.budget._shares), mx.get_active_memory())
