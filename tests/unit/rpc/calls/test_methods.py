"""Every RPC of every served service has its row in the method table, and no row is left over."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from icehouse.v1 import inference_service_pb2, server_service_pb2
from icehouse_server.rpc.calls.methods import METHODS, CallCost, CallPool, Method, MethodAccess
from icehouse_server.rpc.rpc_server import pool_with_v1

from docs import method_table
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.worker import METHODS_HERE, needs_protocol, worker_parts
from tests.unit.rpc.conftest import RunningServer, running


async def served_methods(served: RunningServer) -> set[str]:
    """Ask the server's reflection what it serves; return "service/method"."""
    call: Any = served.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = (await call.read()).list_services_response.service
    pool: Any = pool_with_v1()
    return {
        f"{service.name}/{method.name}"
        for service in listed
        for method in pool.FindServiceByName(service.name).methods
    }


async def test_every_served_method_has_its_row_and_every_row_its_method() -> None:
    async with running(channelz_enabled=True, worker=worker_parts()) as served:
        assert await served_methods(served) == set(METHODS_HERE)


@needs_protocol
async def test_the_worker_protocol_is_served_where_it_is_wanted_alone(served: RunningServer) -> None:
    assert not any(name.startswith("vllm.") for name in await served_methods(served))
    assert any(name.startswith("vllm.") for name in METHODS_HERE)


@pytest.mark.parametrize(("name", "row"), METHODS_HERE.items())
def test_whoever_need_not_prove_anything_is_bounded_apart(name: str, row: Method) -> None:
    is_open = row.access is MethodAccess.OPEN
    assert is_open == (row.pool is CallPool.HEALTH)
    if is_open:
        assert row.message_byte_limit is not None and row.message_timeout_s is not None
        assert row.cost is CallCost.NOTHING


@pytest.mark.parametrize(("name", "row"), METHODS_HERE.items())
def test_what_takes_a_prompt_is_charged_for_it(name: str, row: Method) -> None:
    service, _, method = name.partition("/")
    pool: Any = pool_with_v1()
    fields = pool.FindServiceByName(service).methods_by_name[method].input_type.fields_by_name
    has_prompt = bool({"prompt", "text", "inputs", "documents", "tokenized", "token_ids"} & set(fields))
    assert has_prompt == (row.cost is not CallCost.NOTHING)


@pytest.mark.parametrize(("name", "row"), METHODS.items())
def test_only_what_watches_may_never_end(name: str, row: Method) -> None:
    endless = name.endswith(("/WatchStats", "Health/Watch", "/SubscribeKvEvents"))
    assert (row.deadline_s is None) == endless
    assert row.deadline_s is None or row.deadline_s >= 60, "a minute is always there"


@pytest.mark.parametrize(("name", "row"), METHODS_HERE.items())
def test_of_what_may_never_end_a_caller_has_a_few(name: str, row: Method) -> None:
    # Health watches are a few for each connection, by their pool.
    if row.deadline_s is None and row.pool is not CallPool.HEALTH:
        assert row.caller_limit is not None


def end_soon(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row = dataclasses.replace(METHODS[name], own_deadline_s=0.05)
    monkeypatch.setitem(METHODS, name, row)  # type: ignore[arg-type]


async def test_a_call_without_a_deadline_gets_its_methods(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_soon(monkeypatch, "icehouse.v1.ServerService/WatchStats")
    watch = served.serving.WatchStats(server_service_pb2.WatchStatsRequest(interval={"seconds": 3600}))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in watch:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "had no deadline" in (caught.value.details() or "")


async def test_its_end_is_told_wherever_it_comes(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "icehouse.v1.ServerService/WatchStats"
    for number in range(60):
        # Before the request has come, while the headers or the first message are sent, and behind them.
        row = dataclasses.replace(METHODS[name], own_deadline_s=0.0005 + 0.0002 * number)
        monkeypatch.setitem(METHODS, name, row)  # type: ignore[arg-type]
        watch = served.serving.WatchStats(server_service_pb2.WatchStatsRequest(interval={"seconds": 3600}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in watch:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED, number


async def test_one_that_brings_its_own_keeps_it(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_soon(monkeypatch, "icehouse.v1.ServerService/WatchStats")
    request = server_service_pb2.WatchStatsRequest(interval={"nanos": 100_000_000})
    watch = served.serving.WatchStats(request, timeout=BOUND_S)
    for _ in range(3):
        assert (await watch.read()).HasField("stats")
    watch.cancel()


async def test_the_engine_knows_of_it(served: RunningServer) -> None:
    await served.inference.Generate(
        inference_service_pb2.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
    )
    generate_s = METHODS["icehouse.v1.InferenceService/Generate"].deadline_s
    assert generate_s is not None
    assert served.engine.submitted[0].deadline_time == served.clock.now + generate_s


async def test_a_stream_of_requests_ends_too(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    end_soon(monkeypatch, name)
    call: Any = served.channel.stream_stream(f"/{name}")()
    async with asyncio.timeout(BOUND_S):
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_page_is_written_from_the_table() -> None:
    docs = Path(__file__).parents[4] / "docs"
    assert (docs / "methods.md").read_text(encoding="utf-8") == method_table.markdown(), "run make gen"
