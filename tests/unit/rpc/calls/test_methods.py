"""Every RPC of every served service has its row in the method table, and no row is left over."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2
from icehouse_server.rpc.calls.methods import Access, Cost, Method, Pool
from icehouse_server.rpc.reflection import pool_with_v1

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
    is_open = row.access is Access.OPEN
    assert is_open == (row.pool is Pool.HEALTH)
    if is_open:
        assert row.message_byte_limit is not None and row.message_timeout_s is not None
        assert row.cost is Cost.NOTHING


@pytest.mark.parametrize(("name", "row"), METHODS_HERE.items())
def test_what_takes_a_prompt_is_charged_for_it(name: str, row: Method) -> None:
    service, _, method = name.partition("/")
    pool: Any = pool_with_v1()
    fields = pool.FindServiceByName(service).methods_by_name[method].input_type.fields_by_name
    has_prompt = bool({"text", "chat", "inputs", "documents", "tokenized"} & set(fields))
    assert has_prompt == (row.cost is not Cost.NOTHING)
