"""The standard services: health follows the engine, reflection speaks both versions."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from icehouse_server.domain.model import EngineState
from icehouse_server.rpc.rpc_server import SERVICE_NAMES

from tests.unit.rpc.conftest import RunningServer, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(served: RunningServer) -> set[int]:
    """Return the distinct answers for the whole server and for each service."""
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", *SERVICE_NAMES)]
    return {answer.status for answer in answers}


async def test_health_waits_for_the_model() -> None:
    async with running(ready=False) as served:
        assert await health_of(served) == {NOT_SERVING}
        served.router.state_changed(EngineState.READY, None)
        await served.settle()
        assert await health_of(served) == {SERVING}


@pytest.mark.parametrize("state", [EngineState.DRAINING, EngineState.FAILED, EngineState.STOPPED])
async def test_health_leaves_serving_with_the_engine(served: RunningServer, state: EngineState) -> None:
    assert await health_of(served) == {SERVING}
    served.router.state_changed(state, None)
    await served.settle()
    assert await health_of(served) == {NOT_SERVING}


async def test_health_notices_a_stuck_loop_and_its_recovery(served: RunningServer) -> None:
    served.clock.now += 31
    assert await health_of(served) == {NOT_SERVING}
    served.engine.heartbeat_time = served.clock.now
    assert await health_of(served) == {SERVING}


async def test_steps_that_are_always_long_are_not_stuck(served: RunningServer) -> None:
    served.engine.step_allowance_s = 40.0
    served.clock.now += 31
    assert await health_of(served) == {SERVING}
    served.clock.now += 10
    assert await health_of(served) == {NOT_SERVING}


async def test_watchers_hear_of_a_change_without_asking(served: RunningServer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == SERVING
    served.router.state_changed(EngineState.DRAINING, None)
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_health_of_an_unknown_service_is_not_found(served: RunningServer) -> None:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nonsense"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def reflect(served: RunningServer, version: str, **fields: Any) -> Any:
    method = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(iter([reflection_pb2.ServerReflectionRequest(**fields)]))
    return await call.read()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes(served: RunningServer, version: str) -> None:
    listed = await reflect(served, version, list_services="")
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        *SERVICE_NAMES,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for name in names:
        answer = await reflect(served, version, file_containing_symbol=name)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in answer.file_descriptor_response.file_descriptor_proto
        ]
        described = {f"{file.package}.{service.name}" for file in files for service in file.service}
        assert name in described


@pytest.mark.parametrize(
    "symbol", ["icehouse.v1.InferenceService.Generate", "icehouse.v1.GenerateRequest", "icehouse.v1.CacheUse"]
)
async def test_reflection_finds_methods_and_messages(served: RunningServer, symbol: str) -> None:
    answer = await reflect(served, "v1", file_containing_symbol=symbol)
    assert answer.WhichOneof("message_response") == "file_descriptor_response"
    missing = await reflect(served, "v1", file_containing_symbol=symbol + "x")
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_reflection_can_be_switched_off() -> None:
    async with running(reflection_enabled=False) as served:
        # Nothing is sent: where the refusal is there first, gRPC's Python tells of the message that it could
        # not send any more instead.
        call: grpc.aio.StreamStreamCall[bytes, bytes] = served.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        )()
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
