"""Two models and more in one server: requests by name, unloading for others, failures that harm nobody."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc
from icehouse.v1 import model_service_pb2 as models
from icehouse_server.bootstrap.room import held_bytes

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.fixtures.whole_server import whole_server
from tests.system.crash.crashing_server import ServerProcess
from tests.system.models.pool_server import PoolServer, entry, pool_server, question

ARCHITECTURES = ("llama", "qwen3", "mamba2")
PROMPTS = tuple(tuple((17 * n + i) % 90 + 5 for i in range(20 + 30 * n)) for n in range(3))

KILLED = ("llama", "qwen3")
BLOCK = 16

Said = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: tiny_model_dir(parent, name) for name in ARCHITECTURES}


def size_of(folder: Path) -> int:
    return held_bytes(folder, dtype="float32")


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What each model says to each prompt in a server of its own."""

    async def ask(folder: Path) -> list[list[int]]:
        async with whole_server(folder, tmp_path_factory.mktemp("alone")) as served:
            answers = [await served.inference.Generate(question("", prompt)) for prompt in PROMPTS]
        return [list(answer.token_ids) for answer in answers]

    return {name: asyncio.run(ask(folder)) for name, folder in folders.items()}


async def test_requests_reach_the_model_that_they_name(
    folders: dict[str, Path], alone: Said, tmp_path: Path
) -> None:
    entries = [entry(folder, aliases=(f"{name}-alias",)) for name, folder in folders.items()]
    async with pool_server(tmp_path, entries) as served:
        assert await served.states() == {
            "llama": "MODEL_STATE_READY",
            "qwen3": "MODEL_STATE_ABSENT",
            "mamba2": "MODEL_STATE_ABSENT",
        }
        for name in ("", "llama", "qwen3", "mamba2-alias"):
            answer = await served.inference.Generate(question(name, PROMPTS[0]))
            model = name.removesuffix("-alias") or "llama"
            assert (answer.model, list(answer.token_ids)) == (model, alone[model][0])
            assert answer.HasField("load_duration") == (model != "llama")
        missing = await refused(served.inference.Generate(question("gpt", PROMPTS[0])))
        assert (missing.code, missing.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert "'qwen3'" in missing.message


def room_for(folders: dict[str, Path], share: float) -> int:
    """Return a limit for the weights of the largest model and a part of it again."""
    return int(share * max(map(size_of, folders.values())))


async def ask(served: PoolServer, dice: random.Random, alone: Said) -> None:
    """Ask one thing at random, in full, or leave while it is answered."""
    name, index = dice.choice(ARCHITECTURES), dice.randrange(len(PROMPTS))
    request = question(name, PROMPTS[index])
    if dice.random() < 0.2:
        call = served.inference.Stream(request)
        async with asyncio.timeout(BOUND_S):
            await anext(aiter(call))
        call.cancel()
        return
    call = served.inference.Stream(request)
    answered: list[int] = []
    async for event in call:
        answered += event.delta.token_ids
    assert answered == alone[name][index], name


async def test_models_give_way_to_each_other_and_every_answer_is_what_it_is_alone(
    folders: dict[str, Path], alone: Said, tmp_path: Path
) -> None:
    entries = [entry(folder) for folder in folders.values()]
    dice = random.Random(7)
    async with pool_server(tmp_path, entries) as served:
        # Such small models need more memory to run in than for their weights.
        run_bytes = max(served.pool._opener.locate(name).run_bytes for name in folders)
        assert run_bytes > room_for(folders, 1.5)
        served.pool._limit_bytes = run_bytes + room_for(folders, 1.5)
        for _ in range(3):
            async with asyncio.timeout(BOUND_S), asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(ask(served, random.Random(dice.random()), alone))
            states = (await served.states()).values()
            assert list(states).count("MODEL_STATE_READY") in (1, 2)


async def test_a_model_that_is_damaged_refuses_with_its_reason_and_harms_nobody(
    folders: dict[str, Path], alone: Said, tmp_path: Path
) -> None:
    damaged = tiny_model_dir(tmp_path, "llama", name="damaged")
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    entries = [entry(folders["llama"]), entry(damaged), entry(tmp_path / "absent")]
    async with pool_server(tmp_path / "blocks", entries) as served:
        for name, cause in (("damaged", "MODEL_INVALID"), ("absent", "MODEL_NOT_FOUND")):
            # The second time it is not even tried.
            for _ in range(2):
                refusal = await refused(served.inference.Generate(question(name, PROMPTS[0])))
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_NOT_LOADED")
                assert refusal.info.metadata["cause"] == cause and name in refusal.message
                assert refusal.retry is not None
        listed = await served.models.ListModels(models.ListModelsRequest())
        assert [(m.id, m.state, bool(m.state_detail)) for m in listed.models] == [
            ("llama", models.MODEL_STATE_READY, False),
            ("damaged", models.MODEL_STATE_FAILED, True),
            ("absent", models.MODEL_STATE_FAILED, True),
        ]
        answer = await served.inference.Generate(question("llama", PROMPTS[1]))
        assert list(answer.token_ids) == alone["llama"][1]


async def test_a_model_that_can_never_fit_is_refused_with_the_numbers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    large = tiny_model_dir(tmp_path, "llama", name="large", hidden_size=256)
    entries = [entry(folders["llama"]), entry(large)]
    limit_bytes = size_of(large) - 1
    # A small request, in small chunks, fits beside the other one.
    settings = {"engine__memory_limit_bytes": limit_bytes, "engine__prefill_chunk_token_count": BLOCK}
    async with pool_server(tmp_path / "blocks", entries, **settings) as served:
        refusal = await refused(served.inference.Generate(question("large", PROMPTS[0])))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MEMORY_NEVER_FITS")
        assert refusal.info.metadata == {
            "weight_bytes": str(size_of(large)),
            "limit_bytes": str(limit_bytes),
        }
        assert str(tmp_path) not in refusal.message


async def test_a_model_is_loaded_and_unloaded_on_order_and_is_warm_when_it_comes_back(
    folders: dict[str, Path], alone: Said, tmp_path: Path
) -> None:
    entries = [entry(folder) for folder in folders.values()]
    async with pool_server(tmp_path, entries, server__drain_grace_s=BOUND_S) as served:
        events = [event async for event in served.models.LoadModel(models.LoadModelRequest(model="qwen3"))]
        assert [event.WhichOneof("event") for event in events][-1] == "done"
        assert events[-1].done.state == models.MODEL_STATE_READY and events[-1].done.vocabulary_size
        stream = served.inference.Stream(question("qwen3", PROMPTS[2], output_count=200))
        first = await anext(aiter(stream))
        assert first.WhichOneof("event") == "started" and not first.started.HasField("load_duration")
        answer = await served.models.UnloadModel(models.UnloadModelRequest(model="qwen3"))
        assert answer.model.state == models.MODEL_STATE_ABSENT
        last = [event async for event in stream][-1]
        assert last.WhichOneof("event") == "finished", "what ran was not let end"
        again = await served.inference.Generate(question("qwen3", PROMPTS[2]))
        assert list(again.token_ids) == alone["qwen3"][2]
        assert again.cache.cached_tokens >= 64, "it did not come back warm"
        stats = await served.inference.CacheStats(messages.CacheStatsRequest(model="qwen3"))
        assert stats.cache.ssd.block_count
        unasked = await refused(served.inference.CacheStats(messages.CacheStatsRequest(model="mamba2")))
        assert unasked.reason == "MODEL_NOT_LOADED"


def stored_tokens(inference: Any, name: str, prompt: Sequence[int]) -> messages.GenerateResponse:
    """Ask a model, and wait until what it keeps of the prompt is on SSD."""
    answer: messages.GenerateResponse = inference.Generate(question(name, prompt), timeout=BOUND_S)
    end_time = time.monotonic() + BOUND_S
    while time.monotonic() < end_time:
        stats = inference.CacheStats(messages.CacheStatsRequest(model=name), timeout=BOUND_S)
        if stats.cache.ssd.block_count >= len(prompt) // BLOCK:
            return answer
    raise AssertionError(f"the blocks of {name} were not written")


def test_after_kill_9_every_model_finds_its_blocks(
    folders: dict[str, Path], alone: Said, tmp_path: Path
) -> None:
    served = [folders[name] for name in KILLED]
    options = ("--block-token-count", str(BLOCK), "--min-prefix-token-count", "0")
    for life in range(2):
        with ServerProcess(
            model=served, directory=tmp_path / "blocks", log=tmp_path / f"log-{life}", options=options
        ) as process:
            process.wait_until_serving()
            with grpc.insecure_channel(process.address) as channel:
                inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
                for name in KILLED:
                    answer = stored_tokens(inference, name, PROMPTS[2])
                    assert list(answer.token_ids) == alone[name][2], name
                    assert (answer.cache.ssd_tokens > 0) == (life == 1), name
            process.kill()
