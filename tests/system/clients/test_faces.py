"""The Python client's two faces: what one can do, the other can."""

from __future__ import annotations

import asyncio
import inspect
import socket

import grpc
import pytest
from icehouse_client import (
    AsyncCacheClient,
    AsyncClient,
    AsyncStream,
    CacheClient,
    Client,
    IcehouseClientError,
    Stream,
)

from tests.unit.rpc.conftest import RunningServer


@pytest.mark.parametrize(
    ("face", "other"), [(Client, AsyncClient), (CacheClient, AsyncCacheClient), (Stream, AsyncStream)]
)
def test_both_faces_have_the_same_methods_with_the_same_parameters(face: type, other: type) -> None:
    def methods(of: type) -> dict[str, list[str]]:
        found = {n: m for n, m in inspect.getmembers(of, inspect.isfunction) if not n.startswith("_")}
        return {name: list(inspect.signature(method).parameters) for name, method in found.items()}

    assert methods(face) == methods(other)


async def test_both_faces_ask_for_health(served: RunningServer) -> None:
    def ask() -> str:
        with Client(served.server.address) as client:
            client.wait_until_serving()
            return client.health()

    async with AsyncClient(served.server.address) as client:
        await client.wait_until_serving()
        assert await client.health() == await asyncio.to_thread(ask) == "SERVING"
        with pytest.raises(IcehouseClientError) as caught:
            await client.health("no.such.Service")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_both_faces_pass_options_on_to_grpc(served: RunningServer) -> None:
    narrow = (("grpc.max_receive_message_length", 1),)

    def ask() -> None:
        with Client(served.server.address, watches_health=False, channel_options=narrow) as client:
            client.models()

    async with AsyncClient(served.server.address, watches_health=False, channel_options=narrow) as client:
        for asking in (client.models, lambda: asyncio.to_thread(ask)):
            with pytest.raises(IcehouseClientError) as caught:
                await asking()
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_server_that_never_comes_is_waited_for_until_the_deadline() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with AsyncClient(f"127.0.0.1:{nobody.getsockname()[1]}") as client:
            with pytest.raises(IcehouseClientError) as caught:
                await client.wait_until_serving(timeout_s=0.5)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
