"""What people and programs see of several models: at the terminal, in counters and in lists."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import model_service_pb2, server_service_pb2
from icehouse_client import AsyncClient
from icehouse_client.cli.console import UsageError
from icehouse_server.rpc.services import generation

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.rpc.details import refused
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
    pulled = await invoke("models", "pull", "second", "--json", *at)
    assert json.loads(pulled.output)["models"][0]["state"] == "MODEL_STATE_ABSENT"
    loaded = await invoke("models", "load", "second", "--json", *at)
    assert json.loads(loaded.stdout)["models"][0]["state"] == "MODEL_STATE_READY"
    some = await invoke("models", "load", "absent", "second", *at)
    assert some.exit_code == 1 and "could not be loaded: MODEL_NOT_FOUND" in some.stderr
    assert "qwen3" in some.stdout, "one that fails does not stop the others"
    top = await invoke("top", "--once", *at)
    assert "loaded model" in top.stdout and "qwen3" in top.stdout
    unloaded = await invoke("models", "unload", "second", "--json", *at)
    assert json.loads(unloaded.stdout)["models"][0]["state"] == "MODEL_STATE_ABSENT"
    shown = await invoke("models", "ls", "second", "absent", *at)
    assert "qwen3" in shown.stdout and "failed" in shown.stdout and "llama" not in shown.stdout
    unknown = await invoke("models", "ls", "nosuch", *at)
    assert isinstance(unknown.exception, UsageError) and "'nosuch'" in str(unknown.exception)


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


async def test_a_call_whose_model_cannot_be_loaded_has_its_request_s_id(
    served: PoolServer, caplog: pytest.LogCaptureFixture
) -> None:
    asked = messages.GenerateRequest(request_id="mine", model="absent", prompt={"text": "w5"})
    stream = served.inference.Stream(asked)
    with caplog.at_level("INFO"):
        await refused(served.inference.Generate(asked))
        await refused(stream.read())
    ended = [vars(record) for record in caplog.records if record.getMessage() == "call_ended"]
    assert [each["request_id"] for each in ended] == ["mine", "mine"]


async def test_who_streams_is_told_that_the_model_is_loaded_and_how_long_that_took(
    served: PoolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_TELL_S", 0.001)
    events = [event async for event in served.inference.Stream(question("second", TOKENS))]
    kinds = [event.WhichOneof("event") for event in events]
    loading = [event.loading_model for event in events if event.HasField("loading_model")]
    assert kinds[: len(loading) + 1] == ["loading_model"] * len(loading) + ["started"] and loading
    assert {told.model for told in loading} == {"qwen3"}
    assert {told.state for told in loading} <= {
        model_service_pb2.MODEL_STATE_ABSENT,
        model_service_pb2.MODEL_STATE_FETCHING,
        model_service_pb2.MODEL_STATE_LOADING,
    }
    elapsed = [told.elapsed.ToNanoseconds() for told in loading]
    assert elapsed == sorted(elapsed)
    assert events[len(loading)].started.load_duration.ToNanoseconds() > 0
    await served.models.UnloadModel(model_service_pb2.UnloadModelRequest(model="second"))
    async with AsyncClient(served.address) as client:
        assert (await client.generate(TOKENS, model="second", max_output_tokens=3)).token_ids
        await client.unload_model("second")
        stream = client.stream(TOKENS, model="second", max_output_tokens=3)
        assert "".join([piece async for piece in stream]) == stream.reply.text
    progress = [event async for event in served.models.LoadModel(model_service_pb2.LoadModelRequest())]
    assert [event.WhichOneof("event") for event in progress] == ["done"]
