"""The Python client's `retry_limit`: what is sent again where a server refuses it for now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from icehouse.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    inference_service_pb2_grpc,
    rerank_service_pb2,
    rerank_service_pb2_grpc,
)
from icehouse.v1 import inference_service_pb2 as inference
from icehouse_client import AsyncClient, Client, IcehouseClientError
from icehouse_client.retries import RetryPolicy

EXHAUSTED, INVALID = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT


class BusyServer(
    inference_service_pb2_grpc.InferenceServiceServicer,
    embedding_service_pb2_grpc.EmbeddingServiceServicer,
    rerank_service_pb2_grpc.RerankServiceServicer,
):
    """Refuses its first calls, says when to come back, and counts them all."""

    def __init__(self, refusals: int, *, code: grpc.StatusCode, delay_s: int | None) -> None:
        self._refusals, self._code = refusals, code
        self._delay_s = delay_s
        self.call_count = 0

    async def _met(self, context: Any) -> None:
        self.call_count += 1
        if self.call_count > self._refusals:
            return
        status = Status(code=self._code.value[0], message="not now")
        if self._delay_s is not None:
            retry = RetryInfo()
            retry.retry_delay.FromSeconds(self._delay_s)
            packed = Packed()
            packed.Pack(retry)
            status.details.append(packed)
        details = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(self._code, "not now", trailing_metadata=details)

    async def Generate(self, request: Any, context: Any) -> inference.GenerateResponse:
        await self._met(context)
        return inference.GenerateResponse(text="done")

    async def Embed(self, request: Any, context: Any) -> embedding_service_pb2.EmbedResponse:
        await self._met(context)
        return embedding_service_pb2.EmbedResponse()

    async def Rerank(self, request: Any, context: Any) -> rerank_service_pb2.RerankResponse:
        await self._met(context)
        return rerank_service_pb2.RerankResponse()


@contextlib.asynccontextmanager
async def busy(
    refusals: int, *, code: grpc.StatusCode = EXHAUSTED, delay_s: int | None = 0
) -> AsyncIterator[tuple[BusyServer, str]]:
    server = grpc.aio.server()
    servicer = BusyServer(refusals, code=code, delay_s=delay_s)  # type: ignore[abstract]
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(servicer, server)
    rerank_service_pb2_grpc.add_RerankServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(client: AsyncClient, method: str) -> object:
    match method:
        case "embed":
            return await client.embed(["Hi"], timeout_s=20)
        case "rerank":
            return await client.rerank("Hi", ["ho"], timeout_s=20)
        case _:
            return await client.generate("Hi", timeout_s=20)


@pytest.mark.parametrize("method", ["generate", "embed", "rerank"])
async def test_what_is_refused_for_now_is_sent_again(method: str) -> None:
    async with busy(2) as (server, address), AsyncClient(address, retry_limit=2) as client:
        await ask(client, method)
    assert server.call_count == 3


@pytest.mark.parametrize("method", ["generate", "embed", "rerank"])
async def test_also_without_an_event_loop(method: str) -> None:
    def use(address: str) -> None:
        with Client(address, retry_limit=1) as client:
            arguments: tuple[Any, ...] = {"embed": (["Hi"],), "rerank": ("Hi", ["ho"])}.get(method, ("Hi",))
            getattr(client, method)(*arguments, timeout_s=20)

    async with busy(1) as (server, address):
        await asyncio.to_thread(use, address)
    assert server.call_count == 2


@pytest.mark.parametrize(
    ("limit", "code", "delay_s", "expected"),
    [
        pytest.param(0, EXHAUSTED, 0, 1, id="nobody asked for it"),
        pytest.param(3, EXHAUSTED, 0, 4, id="as often as was asked"),
        pytest.param(3, EXHAUSTED, None, 1, id="the server does not say when"),
        pytest.param(3, INVALID, 0, 1, id="it will never do"),
        pytest.param(3, EXHAUSTED, 3600, 1, id="the deadline comes first"),
    ],
)
async def test_nothing_else_is(limit: int, code: grpc.StatusCode, delay_s: int | None, expected: int) -> None:
    async with (
        busy(99, code=code, delay_s=delay_s) as (server, address),
        AsyncClient(address, retry_limit=limit) as client,
    ):
        with pytest.raises(IcehouseClientError) as caught:
            await client.generate("Hi", timeout_s=20)
    assert (caught.value.code, server.call_count) == (code, expected)


def test_every_attempt_has_what_is_left_of_the_deadline() -> None:
    told: list[float] = []

    def attempt(left_s: float | None) -> None:
        told.append(left_s or 0.0)
        raise IcehouseClientError(
            EXHAUSTED, "not now", reason="QUEUE_FULL", metadata={}, field=None, retry_after_s=0.0
        )

    with pytest.raises(IcehouseClientError):
        RetryPolicy(retry_limit=2).run(attempt, 20.0)
    assert len(told) == 3 and 20.0 >= told[0] > told[1] > told[2] > 0.0


def test_a_limit_is_no_negative_number() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Client("127.0.0.1:1", retry_limit=-1)
