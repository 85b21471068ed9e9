"""Adapters as requests name them: what reaches the engine, what models show, and every wrong name."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest
from icehouse.v1 import cache_service_pb2, model_service_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain.cache_commands import Explain, ListKnown, Pin, Unpin
from icehouse_server.domain.ids import NO_ADAPTER, AdapterDigest, AdapterName, CacheScope
from icehouse_server.domain.model import AdapterInfo

from tests.fixtures.rpc.details import refused
from tests.fixtures.rpc.fake_engine import MODEL_INFO
from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.conftest import RunningServer, running

LEGAL = AdapterName("legal")
ADAPTERS = tuple(
    AdapterInfo(AdapterName(name), kind, AdapterDigest(bytes([i]) * 32), 100 + i, 400 + i)
    for i, (name, kind) in enumerate((("legal", "lora"), ("sql:v2", "dora")))
)


@pytest.fixture
async def adapted() -> AsyncIterator[RunningServer]:
    """A server whose model has two adapters."""
    async with running(info=dataclasses.replace(MODEL_INFO, adapters=ADAPTERS)) as served:
        yield served


async def test_the_chosen_adapter_reaches_the_engine(adapted: RunningServer) -> None:
    await adapted.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2))
    chosen = messages.GenerateRequest(prompt={"text": "Hi", "adapter": "legal"}, max_output_tokens=2)
    assert [event async for event in adapted.inference.Stream(chosen)]
    await done(adapted.cache.Warm(cache_service_pb2.WarmRequest(prompt={"text": "Hi", "adapter": "sql:v2"})))
    assert [submitted.adapter for submitted in adapted.engine.submitted] == [NO_ADAPTER, "legal", "sql:v2"]


async def test_orders_to_the_cache_are_about_its_blocks(adapted: RunningServer) -> None:
    # This engine has no cache and refuses them; what it was asked is what counts.
    await refused(
        adapted.cache.Explain(cache_service_pb2.ExplainRequest(prompt={"text": "Hi", "adapter": "legal"}))
    )
    await refused(adapted.cache.Pin(cache_service_pb2.PinRequest(prompt={"text": "Hi", "adapter": "legal"})))
    await refused(
        adapted.cache.Unpin(cache_service_pb2.UnpinRequest(prompt={"text": "Hi", "adapter": "legal"}))
    )
    await refused(
        adapted.cache.Evict(cache_service_pb2.EvictRequest(prompt={"text": "Hi", "adapter": "legal"})).read()
    )
    scope, tokens = CacheScope(adapter=LEGAL), tuple(b"Hi")
    assert adapted.engine.orders == [
        Explain(tokens, scope),
        Pin(tokens, scope),
        Unpin(tokens, scope),
        ListKnown(tokens, scope),
    ]


async def test_models_show_their_adapters(adapted: RunningServer) -> None:
    [listed] = (await adapted.models.ListModels(model_service_pb2.ListModelsRequest())).models
    got = (await adapted.models.GetModel(model_service_pb2.GetModelRequest())).model
    assert listed == got
    shown = [(a.name, a.kind, a.digest, a.parameter_count, a.weight_bytes) for a in listed.adapters]
    assert shown == [("legal", "lora", "00" * 32, 100, 400), ("sql:v2", "dora", "01" * 32, 101, 401)]


async def test_a_name_that_is_not_served_is_not_found_by_any_method(adapted: RunningServer) -> None:
    calls = [
        adapted.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi", "adapter": "Legal"})),
        adapted.inference.Stream(messages.GenerateRequest(prompt={"text": "Hi", "adapter": "Legal"})).read(),
        adapted.cache.Warm(cache_service_pb2.WarmRequest(prompt={"text": "Hi", "adapter": "Legal"})).read(),
        adapted.cache.Explain(cache_service_pb2.ExplainRequest(prompt={"text": "Hi", "adapter": "Legal"})),
        adapted.cache.Pin(cache_service_pb2.PinRequest(prompt={"text": "Hi", "adapter": "Legal"})),
        adapted.cache.Unpin(cache_service_pb2.UnpinRequest(prompt={"text": "Hi", "adapter": "Legal"})),
        adapted.cache.Evict(cache_service_pb2.EvictRequest(prompt={"text": "Hi", "adapter": "Legal"})).read(),
    ]
    for call in calls:
        answer = await refused(call)
        assert (answer.code, answer.reason) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")
        assert answer.info.metadata == {
            "adapter": "Legal",
            "served_adapters": "legal, sql:v2",
            "served_count": "2",
        }
    assert not adapted.engine.submitted and not adapted.engine.orders


async def test_a_long_name_and_many_adapters_fit_the_trailers() -> None:
    many = tuple(dataclasses.replace(ADAPTERS[0], name=AdapterName(f"{i:064}")) for i in range(64))
    async with running(info=dataclasses.replace(MODEL_INFO, adapters=many)) as served:
        request = messages.GenerateRequest(prompt={"text": "Hi", "adapter": "x" * 9000})
        answer = await refused(served.inference.Generate(request))
    assert (answer.reason, answer.info.metadata["served_count"]) == ("ADAPTER_NOT_FOUND", "64")


async def test_where_none_is_served_the_message_says_so(served: RunningServer) -> None:
    answer = await refused(
        served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi", "adapter": "legal"}))
    )
    assert "none" in answer.message and answer.info.metadata["served_adapters"] == ""
