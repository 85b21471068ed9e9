"""The Python client with the published service config: what is tried again, and who is passed over."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as inference
from icehouse.v1 import inference_service_pb2_grpc
from icehouse_client import AsyncClient, IcehouseClientError
from icehouse_client.channel import SERVICE_CONFIG

from tests.fixtures.patience import BOUND_S

SERVICE = "icehouse.v1.InferenceService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PUBLISHED = Path(__file__).parents[3] / "clients/service_config.json"


class Replica(inference_service_pb2_grpc.InferenceServiceServicer):
    """A server that refuses its first calls and counts them all."""

    def __init__(self, name: str, *, refusals: int, code: grpc.StatusCode) -> None:
        self.name = name
        self.counts = {"Generate": 0, "Stream": 0, "Tokenize": 0}
        self._refusals = refusals
        self._code = code

    async def _met(self, method: str, context: Any) -> None:
        self.counts[method] += 1
        if self.counts[method] <= self._refusals:
            await context.abort(self._code, "not now")

    async def Generate(self, request: Any, context: Any) -> inference.GenerateResponse:
        await self._met("Generate", context)
        return inference.GenerateResponse(text=self.name)

    async def Stream(self, request: Any, context: Any) -> AsyncIterator[inference.StreamResponse]:
        await self._met("Stream", context)
        yield inference.StreamResponse(finished=inference.Finished())

    async def Tokenize(self, request: Any, context: Any) -> inference.TokenizeResponse:
        await self._met("Tokenize", context)
        return inference.TokenizeResponse()

    async def Detokenize(self, request: Any, context: Any) -> inference.DetokenizeResponse:
        return inference.DetokenizeResponse()

    async def CacheStats(self, request: Any, context: Any) -> inference.CacheStatsResponse:
        return inference.CacheStatsResponse()


@contextlib.asynccontextmanager
async def replica(
    name: str = "one",
    *,
    refusals: int = 0,
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
    status: int | None = SERVING,
) -> AsyncIterator[tuple[Replica, str]]:
    """Start one; `status` is what its health says, None leaves it without a health service."""
    server, servicer = grpc.aio.server(), Replica(name, refusals=refusals, code=code)
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    if status is not None:
        judge = health.aio.HealthServicer()
        await judge.set(SERVICE, status)
        health_pb2_grpc.add_HealthServicer_to_server(judge, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(client: AsyncClient, method: str) -> object:
    match method:
        case "Generate":
            return await client.generate("Hi", timeout_s=BOUND_S)
        case "Stream":
            return [text async for text in client.stream("Hi", timeout_s=BOUND_S)]
        case _:
            return await client.tokenize("Hi", timeout_s=BOUND_S)


async def refused(client: AsyncClient, method: str) -> grpc.StatusCode:
    with pytest.raises(IcehouseClientError) as caught:
        await call(client, method)
    return caught.value.code


async def test_a_generate_that_no_server_took_is_tried_again() -> None:
    async with replica(refusals=2) as (server, address), AsyncClient(address) as client:
        assert (await client.generate("Hi", timeout_s=BOUND_S)).text == "one"
        assert server.counts["Generate"] == 3


@pytest.mark.parametrize("method", ["Stream", "Tokenize"])
async def test_nothing_else_is_tried_again(method: str) -> None:
    async with replica(refusals=1) as (server, address), AsyncClient(address) as client:
        assert await refused(client, method) is grpc.StatusCode.UNAVAILABLE
        assert server.counts[method] == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL])
async def test_no_other_refusal_is_answered_by_asking_again(code: grpc.StatusCode) -> None:
    async with replica(refusals=1, code=code) as (server, address), AsyncClient(address) as client:
        assert await refused(client, "Generate") is code
        assert server.counts["Generate"] == 1


async def test_trying_again_ends() -> None:
    async with replica(refusals=99) as (server, address), AsyncClient(address) as client:
        assert await refused(client, "Generate") is grpc.StatusCode.UNAVAILABLE
        assert server.counts["Generate"] == 4


async def test_a_server_that_says_it_does_not_serve_is_passed_over() -> None:
    async with replica("well") as (_, well), replica("ill", status=NOT_SERVING) as (ill_server, ill):
        async with AsyncClient(f"ipv4:{ill},{well}") as client:
            assert {(await client.generate("Hi", timeout_s=BOUND_S)).text for _ in range(6)} == {"well"}
        assert ill_server.counts["Generate"] == 0


async def test_health_may_be_left_unwatched() -> None:
    async with (
        replica(status=NOT_SERVING) as (_, address),
        AsyncClient(address, watches_health=False) as client,
    ):
        assert (await client.generate("Hi", timeout_s=BOUND_S)).text == "one"


async def test_a_server_without_health_is_used() -> None:
    async with replica(status=None) as (_, address), AsyncClient(address) as client:
        assert (await client.generate("Hi", timeout_s=BOUND_S)).text == "one"


def test_the_client_carries_the_published_config() -> None:
    assert PUBLISHED.read_text() == SERVICE_CONFIG, "copy clients/service_config.json into the package"
