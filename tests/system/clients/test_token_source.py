"""The Python client's token: asked of its source, kept, asked anew where the server refuses it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from icehouse.v1 import cache_service_pb2 as cache
from icehouse.v1 import cache_service_pb2_grpc, inference_service_pb2_grpc
from icehouse.v1 import inference_service_pb2 as inference
from icehouse_client import AsyncClient, Client, IcehouseClientError, Security

from tests.fixtures.patience import BOUND_S

REFUSED = grpc.StatusCode.UNAUTHENTICATED


class Guard(inference_service_pb2_grpc.InferenceServiceServicer, cache_service_pb2_grpc.CacheServiceServicer):
    """Lets those in who have the token of the moment, and writes down what each call carried."""

    def __init__(self) -> None:
        self.token = "t1"
        self.seen: list[dict[str, str]] = []

    async def _met(self, context: Any) -> None:
        carried = dict(context.invocation_metadata())
        self.seen.append(carried)
        if carried.get("authorization") != f"Bearer {self.token}":
            await context.abort(REFUSED, "not you")

    async def Generate(self, request: Any, context: Any) -> inference.GenerateResponse:
        await self._met(context)
        return inference.GenerateResponse(text="done")

    async def Stream(self, request: Any, context: Any) -> AsyncIterator[inference.StreamResponse]:
        await self._met(context)
        yield inference.StreamResponse(delta=inference.Delta(text="done"))

    async def Warm(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._met(context)
        yield cache.WarmResponse(done=cache.WarmResult())


class Source:
    """Gives "t1", "t2" and so on."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return f"t{self.count}"


@contextlib.asynccontextmanager
async def guarded() -> AsyncIterator[tuple[Guard, str]]:
    server = grpc.aio.server()
    guard = Guard()  # type: ignore[abstract]
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(guard, server)
    cache_service_pb2_grpc.add_CacheServiceServicer_to_server(guard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield guard, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


CALLS: dict[str, Callable[[Client], object]] = {
    "generate": lambda client: client.generate("Hi", timeout_s=BOUND_S),
    "stream": lambda client: list(client.stream("Hi", timeout_s=BOUND_S)),
    "warm": lambda client: client.cache.warm("Hi", on_progress=print, timeout_s=BOUND_S),
}


async def stream_of(client: AsyncClient) -> None:
    async for _ in client.stream("Hi", timeout_s=BOUND_S):
        pass


ASYNC_CALLS: dict[str, Callable[[AsyncClient], Awaitable[object]]] = {
    "generate": lambda client: client.generate("Hi", timeout_s=BOUND_S),
    "stream": stream_of,
    "warm": lambda client: client.cache.warm("Hi", on_progress=print, timeout_s=BOUND_S),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_refused_token_is_asked_for_anew_and_the_call_made_again(
    call: Callable[[Client], object],
) -> None:
    def use(guard: Guard, address: str, source: Source) -> None:
        with Client(address, security=Security(token=source)) as client:
            call(client)
            call(client)
            assert source.count == 1
            guard.token = "t2"
            call(client)
            assert (source.count, len(guard.seen)) == (2, 4)
            guard.token = "t9"
            with pytest.raises(IcehouseClientError) as caught:
                call(client)
            assert (caught.value.code, source.count, len(guard.seen)) == (REFUSED, 3, 6)

    async with guarded() as (guard, address):
        await asyncio.to_thread(use, guard, address, Source())


@pytest.mark.parametrize("call", ASYNC_CALLS.values(), ids=ASYNC_CALLS)
@pytest.mark.parametrize("is_awaited", [False, True])
async def test_also_on_an_event_loop_where_a_source_may_be_awaited(
    call: Callable[[AsyncClient], Awaitable[object]], is_awaited: bool
) -> None:
    source = Source()

    async def awaited() -> str:
        return source()

    security = Security(token=awaited if is_awaited else source)
    async with guarded() as (guard, address), AsyncClient(address, security=security) as client:
        await call(client)
        await call(client)
        assert source.count == 1
        guard.token = "t2"
        await call(client)
        assert (source.count, len(guard.seen)) == (2, 4)
        guard.token = "t9"
        with pytest.raises(IcehouseClientError) as caught:
            await call(client)
        assert (caught.value.code, source.count, len(guard.seen)) == (REFUSED, 3, 6)


async def test_a_token_without_a_source_is_refused_for_good() -> None:
    async with guarded() as (guard, address), AsyncClient(address, security=Security(token="t0")) as client:
        with pytest.raises(IcehouseClientError):
            await client.generate("Hi", timeout_s=BOUND_S)
        assert len(guard.seen) == 1


async def test_a_view_of_a_client_adds_its_metadata_to_every_call() -> None:
    def use(guard: Guard, address: str) -> None:
        with Client(address, security=Security(token="t0")) as client:
            view = client.with_metadata({"x-team": "search"}).with_metadata({"authorization": "Bearer t1"})
            for call in CALLS.values():
                call(view)
            assert [seen["x-team"] for seen in guard.seen] == ["search"] * 3
            with pytest.raises(IcehouseClientError):
                client.generate("Hi", timeout_s=BOUND_S)
            assert "x-team" not in guard.seen[-1]

    async with guarded() as (guard, address):
        await asyncio.to_thread(use, guard, address)
        async with AsyncClient(address) as client:
            view = client.with_metadata({"authorization": "Bearer t1"})
            for call in ASYNC_CALLS.values():
                await call(view)


def test_a_source_that_is_to_be_awaited_is_for_the_async_client() -> None:
    async def awaited() -> str:
        return "t1"

    with (
        Client("127.0.0.1:1", security=Security(token=awaited)) as client,
        pytest.raises(TypeError, match="coroutine"),
    ):
        client.generate("Hi", timeout_s=BOUND_S)
