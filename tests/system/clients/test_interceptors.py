"""The Python client's interceptors: gRPC's own, around every attempt of every call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from icehouse_client import AsyncClient, Client, IcehouseClientError, Security

from tests.fixtures.patience import BOUND_S
from tests.system.clients.test_token_source import REFUSED, Guard, Source, guarded

SENT = ("x-sent-by", "test")


def marked(details: Any) -> Any:
    """Return a call's details with metadata of ours beside what the client sends."""
    return details._replace(metadata=[*(details.metadata or ()), SENT])


class Log:
    """Adds metadata and writes the methods down."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def pass_on(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method = details.method if isinstance(details.method, str) else details.method.decode()
        self._log.append(f"{self._name} {method.rpartition('/')[2]}")
        return continuation(marked(details), request)


class Marking(Log, grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """For both kinds of calls."""

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return self.pass_on(continuation, details, request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return self.pass_on(continuation, details, request)


class AsyncMarking(Log, grpc.aio.UnaryUnaryClientInterceptor):
    """The same on an event loop, where the call is awaited."""

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await self.pass_on(continuation, details, request)


class AsyncStreamMarking(Log, grpc.aio.UnaryStreamClientInterceptor):
    """The same for streams: on an event loop one is for one kind of call."""

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await self.pass_on(continuation, details, request)


EXPECTED = ["Generate", "Generate", "Stream", "Warm", "Generate"]
"""The second one is the attempt with another token; the last one is refused."""


def assert_seen(guard: Guard, log: list[str]) -> None:
    assert [line for line in log if line.startswith("outer")] == [f"outer {name}" for name in EXPECTED]
    assert len(guard.seen) == len(EXPECTED)
    for carried in guard.seen:
        assert carried["x-sent-by"] == "test" and "icehouse-prefix-key" in carried


async def test_every_attempt_goes_through_them() -> None:
    log: list[str] = []

    def use(guard: Guard, address: str) -> None:
        guard.token = "t2"
        both = [Marking("outer", log), Marking("inner", log)]
        with Client(
            address, security=Security(token=Source()), interceptors=both, timeout_s=BOUND_S
        ) as client:
            assert client.generate("Hi").text == "done"
            assert list(client.stream("Hi")) == ["done"]
            client.with_metadata({"x-team": "search"}).cache.warm("Hi", on_progress=print)
        refused = Client(address, security=Security(token="t9"), interceptors=both[:1], timeout_s=BOUND_S)
        with refused, pytest.raises(IcehouseClientError) as caught:
            refused.generate("Hi")
        assert caught.value.code is REFUSED and caught.value.message == "not you"

    async with guarded() as (guard, address):
        await asyncio.to_thread(use, guard, address)
    assert_seen(guard, log)
    assert log[:2] == ["outer Generate", "inner Generate"]
    assert guard.seen[3]["x-team"] == "search"


async def test_also_on_an_event_loop() -> None:
    log: list[str] = []
    both = [AsyncMarking("outer", log), AsyncStreamMarking("outer", log)]
    async with guarded() as (guard, address):
        guard.token = "t2"
        security = Security(token=Source())
        async with AsyncClient(address, security=security, interceptors=both, timeout_s=BOUND_S) as client:
            assert (await client.generate("Hi")).text == "done"
            assert [text async for text in client.stream("Hi")] == ["done"]
            await client.cache.warm("Hi", on_progress=print)
        security = Security(token="t9")
        async with AsyncClient(address, security=security, interceptors=both, timeout_s=BOUND_S) as client:
            with pytest.raises(IcehouseClientError) as caught:
                await client.generate("Hi")
    assert caught.value.code is REFUSED and caught.value.message == "not you"
    assert_seen(guard, log)


async def test_what_one_answers_or_raises_is_the_callers() -> None:
    class Cutting(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            raise ConnectionAbortedError("not today")

    def use(address: str) -> None:
        client = Client(address, interceptors=[Cutting()])
        with client, pytest.raises(ConnectionAbortedError, match="not today"):
            client.generate("Hi")

    async with guarded() as (guard, address):
        await asyncio.to_thread(use, address)
    assert guard.seen == []
