"""What people and programs see of several models: at the terminal, in counters and in lists."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import server_service_pb2
from icehouse_client import AsyncClient

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.terminal import invoke
from tests.system.models.pool_server import PoolServer, entry, pool_server, question

TOKENS = tuple(range(10, 40))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[PoolServer]:
    entries = [
        entry(tiny_model_dir(tmp_path, "llama")),
        entry(tiny_model_dir(tmp_path, "qwen3"), aliases=("second",)),
        entry(tmp_path / "absent"),
    ]
    async with pool_server(tmp_path / "blocks", entries) as started:
        yield started


async def test_models_are_listed_loaded_and_unloaded_at_the_terminal(served: PoolServer) -> None:
    at = ("--address", served.address)
    before = await invoke("ps", *at)
    assert before.exit_code == 0, before.output
    for words in ("llama", "ready", "qwen3", "absent", "second"):
        assert words in before.stdout, words
    loaded = await invoke("models", "load", "second", "--json", *at)
    assert json.loads(loaded.stdout)["models"][0]["state"] == "MODEL_STATE_READY"
    assert "could not be loaded: MODEL_NOT_FOUND" in (await invoke("models", "load", "absent", *at)).output
    top = await invoke("top", "--once", *at)
    assert "loaded model" in top.stdout and "qwen3" in top.stdout
    unloaded = await invoke("models", "unload", "second", "--json", *at)
    assert json.loads(unloaded.stdout)["models"][0]["state"] == "MODEL_STATE_ABSENT"
    shown = await invoke("models", "ls", "second", "absent", *at)
    assert "qwen3" in shown.stdout and "failed" in shown.stdout and "llama" not in shown.stdout


async def test_the_client_loads_and_unloads(served: PoolServer) -> None:
    async with AsyncClient(served.address) as client:
        assert (await client.load_model("qwen3")).vocabulary_size
        assert (await client.unload_model("second")).id == "qwen3"


async def test_counters_are_those_of_each_loaded_model(served: PoolServer) -> None:
    for name, count in (("llama", 1), ("qwen3", 2)):
        for index in range(count):
            await served.inference.Generate(question(name, (*TOKENS, index)))
    stats = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
    assert {each.model: each.engine.finished_total for each in stats.models} == {"llama": 1, "qwen3": 2}
    assert stats.engine.finished_total == 1
    await served.served.rpc.observation.sample()
    snapshot = served.served.rpc.observation.latest
    assert snapshot.models is not None and [*snapshot.models] == ["llama", "qwen3"]
    second = snapshot.models["qwen3"]
    assert second.engine is not None and second.engine.finished_total == 2
    assert second.model is not None and second.model.model_id == "qwen3"


async def test_a_request_id_is_one_of_the_whole_server_and_requests_of_all_models_are_listed(
    served: PoolServer,
) -> None:
    calls = [
        served.inference.Stream(
            messages.GenerateRequest(
                request_id=f"of-{name}", model=name, prompt={"tokens": {"ids": TOKENS}}, max_output_tokens=200
            )
        )
        for name in ("llama", "qwen3")
    ]
    for call in calls:
        while (await call.read()).WhichOneof("event") != "delta":
            pass
    listed = await served.serving.ListRequests(server_service_pb2.ListRequestsRequest())
    told = [(request.request_id, request.model) for request in listed.requests]
    assert told == [("of-llama", "llama"), ("of-qwen3", "qwen3")]
    for call in calls:
        call.cancel()
