"""Every call that names a model, for one that is not loaded: loads it, works without it, or refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1 import (
    cache_service_pb2,
    embedding_service_pb2,
    inference_service_pb2,
    model_service_pb2,
    prompt_pb2,
    rerank_service_pb2,
)

from tests.fixtures.models import tiny_model_dir
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import refused
from tests.system.models.pool_server import PoolServer, entry, pool_server, question

ABSENT = "absent"
TOKENS = tuple(5 + (11 * i) % 80 for i in range(70))
PROMPT = prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(ids=TOKENS))
INPUT = embedding_service_pb2.EmbedInput(text="a")
Call = Callable[[PoolServer], Awaitable[Any]]


async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]


async def imported(served: PoolServer) -> Any:
    target = cache_service_pb2.ImportTarget(model=ABSENT)
    return await served.cache.Import(iter([cache_service_pb2.ImportRequest(target=target)]))


cache, inference = cache_service_pb2, inference_service_pb2
LOADING: dict[str, Call] = {
    "Generate": lambda s: s.inference.Generate(question(ABSENT, TOKENS)),
    "Stream": lambda s: all_of(s.inference.Stream(question(ABSENT, TOKENS))),
    "Tokenize": lambda s: s.inference.Tokenize(
        inference.TokenizeRequest(model=ABSENT, prompt=prompt_pb2.Prompt(text="a"))
    ),
    "Detokenize": lambda s: s.inference.Detokenize(
        inference.DetokenizeRequest(model=ABSENT, token_ids=TOKENS)
    ),
    "Embed": lambda s: s.embeddings.Embed(embedding_service_pb2.EmbedRequest(model=ABSENT, inputs=[INPUT])),
    "Explain": lambda s: s.cache.Explain(cache.ExplainRequest(model=ABSENT, prompt=PROMPT)),
    "Warm": lambda s: all_of(s.cache.Warm(cache.WarmRequest(model=ABSENT, prompt=PROMPT))),
    "Pin": lambda s: s.cache.Pin(cache.PinRequest(model=ABSENT, prompt=PROMPT)),
    "Unpin": lambda s: s.cache.Unpin(cache.UnpinRequest(model=ABSENT, prompt=PROMPT)),
    "Export": lambda s: all_of(s.cache.Export(cache.ExportRequest(model=ABSENT, prompt=PROMPT))),
    "Import": imported,
    "Evict": lambda s: all_of(s.cache.Evict(cache.EvictRequest(model=ABSENT, prompt=PROMPT))),
    "EvictAll": lambda s: all_of(s.cache.EvictAll(cache.EvictAllRequest(model=ABSENT))),
    "LoadModel": lambda s: all_of(s.models.LoadModel(model_service_pb2.LoadModelRequest(model=ABSENT))),
}
"""They go by the model's tokenizer and blocks, so they load it, whatever else they answer."""
WITHOUT: dict[str, Call] = {
    "EndSession": lambda s: s.cache.EndSession(cache.EndSessionRequest(model=ABSENT, session_id="s")),
    "Verify": lambda s: all_of(s.cache.Verify(cache.VerifyRequest(model=ABSENT))),
    "GetModel": lambda s: s.models.GetModel(model_service_pb2.GetModelRequest(model=ABSENT)),
    "UnloadModel": lambda s: s.models.UnloadModel(model_service_pb2.UnloadModelRequest(model=ABSENT)),
}
REFUSING: dict[str, Call] = {
    "CacheStats": lambda s: s.inference.CacheStats(inference.CacheStatsRequest(model=ABSENT)),
}
ELSEWHERE = {"Rerank"}
"""It loads as Embed does; these models are no rerankers."""


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    parent = tmp_path_factory.mktemp("models")
    names = ("loaded", ABSENT)
    return [entry(tiny_model_dir(parent, "llama", name=name, seed=n)) for n, name in enumerate(names)]


def test_every_call_that_names_a_model_is_here() -> None:
    files = (cache, embedding_service_pb2, inference, model_service_pb2, rerank_service_pb2)
    naming = {
        method.name
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if "model" in method.input_type.fields_by_name or method.name == "Import"
    }
    assert naming == {*LOADING, *WITHOUT, *REFUSING, *ELSEWHERE}


async def test_calls_that_need_the_model_load_it(entries: list[Any], tmp_path: Path) -> None:
    async with pool_server(tmp_path, entries, server__drain_grace_s=BOUND_S) as served:
        for name, call in LOADING.items():
            await call(served)
            assert (await served.states())[ABSENT] == "MODEL_STATE_READY", name
            await served.models.UnloadModel(model_service_pb2.UnloadModelRequest(model=ABSENT))


async def test_other_calls_do_without_it(entries: list[Any], tmp_path: Path) -> None:
    async with pool_server(tmp_path, entries) as served:
        for name, call in WITHOUT.items():
            await call(served)
            assert (await served.states())[ABSENT] == "MODEL_STATE_ABSENT", name
        for name, call in REFUSING.items():
            assert (await refused(call(served))).reason == "MODEL_NOT_LOADED", name
            assert (await served.states())[ABSENT] == "MODEL_STATE_ABSENT", name


async def test_blocks_of_a_model_that_is_not_loaded_are_checked_all_the_same(
    entries: list[Any], tmp_path: Path
) -> None:
    async with pool_server(tmp_path, entries, server__drain_grace_s=BOUND_S) as served:
        await served.inference.Generate(question(ABSENT, TOKENS))
        await served.models.UnloadModel(model_service_pb2.UnloadModelRequest(model=ABSENT))
        for model in (ABSENT, ""):
            events = await all_of(served.cache.Verify(cache.VerifyRequest(model=model)))
            assert events[-1].done.verified_block_count >= len(TOKENS) // 16, "they were written as it went"
        await served.models.UnloadModel(model_service_pb2.UnloadModelRequest(model="loaded"))
        none = await refused(all_of(served.cache.Verify(cache.VerifyRequest(model=ABSENT))))
        assert none.reason == "MODEL_NOT_LOADED" and "icehouse cache verify" in none.message
        unknown = await refused(all_of(served.cache.Verify(cache.VerifyRequest(model="other"))))
        assert unknown.reason == "MODEL_NOT_FOUND"


async def test_the_end_of_a_session_is_told_only_to_a_loaded_model(
    entries: list[Any], tmp_path: Path
) -> None:
    async with pool_server(tmp_path, entries, server__drain_grace_s=BOUND_S) as served:
        for model, count in (("loaded", True), (ABSENT, False)):
            asked = question(model, TOKENS)
            asked.session_id = "s"
            await served.inference.Generate(asked)
            if model == ABSENT:
                await served.models.UnloadModel(model_service_pb2.UnloadModelRequest(model=ABSENT))
            ended = await served.cache.EndSession(cache.EndSessionRequest(model=model, session_id="s"))
            assert (ended.block_count > 0) is count, model
        missing = await refused(served.cache.EndSession(cache.EndSessionRequest(model=ABSENT)))
        assert missing.reason == "PARAMETER_OUT_OF_RANGE", "it is refused as for any other model"
