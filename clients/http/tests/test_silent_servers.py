"""Servers that say nothing: one that takes connections and never answers, one that is stuck, and one that
computes for long, which is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterable
from typing import Any

import anthropic
import grpc
import openai
import pytest
from icehouse_client import AsyncClient, IcehouseClientError
from icehouse_server.domain.events import Event
from icehouse_server.domain.request import GenerationRequest

from clients.http.tests.fronts import HttpFront, front_of
from clients.http.tests.test_sdks import CHAT, MESSAGES
from tests.fixtures.rpc.fake_engine import counting
from tests.unit.rpc.conftest import RunningServer


@dataclasses.dataclass(frozen=True)
class MuteServer:
    """Takes connections and drops what they send."""

    address: str
    taken: list[asyncio.BaseTransport]


class Mute(asyncio.Protocol):
    """One connection."""

    def __init__(self, taken: list[asyncio.BaseTransport]) -> None:
        self._taken = taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._taken.append(transport)


@pytest.fixture
async def mute() -> AsyncIterator[MuteServer]:
    taken: list[asyncio.BaseTransport] = []
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Mute(taken), "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        yield MuteServer(f"{host}:{port}", taken)
        for connection in taken:
            connection.close()


async def test_a_mute_server_is_given_up_long_before_grpc_would_and_by_all_connections(
    mute: MuteServer,
) -> None:
    async with AsyncClient(mute.address) as plain, front_of(mute.address, connect_timeout_s=0.1) as front:
        patient = asyncio.ensure_future(plain.models())
        with pytest.raises(openai.InternalServerError) as told:
            await front.openai.chat.completions.create(**CHAT)
        assert told.value.status_code == 503 and "retry-after" in told.value.response.headers
        # The other connections have not been called yet, and know it too. One is that of the patient client.
        assert len(mute.taken) >= 4
        with pytest.raises(anthropic.APIStatusError) as again:
            await front.anthropic.messages.create(**MESSAGES)
        assert again.value.status_code == 503
        assert (await front.http.get("/health")).status_code == 503
        assert not patient.done(), "gRPC waits for 20 s"
    with pytest.raises((IcehouseClientError, asyncio.CancelledError)):
        await patient


@contextlib.asynccontextmanager
async def stuck_server() -> AsyncIterator[str]:
    """A server whose gRPC answers pings and whose methods never return."""

    async def hang(request: bytes, context: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    method: Any = grpc.unary_unary_rpc_method_handler(hang)
    service = grpc.method_handlers_generic_handler("icehouse.v1.ModelService", {"ListModels": method})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_server_that_is_stuck_is_no_longer_waited_for_than_a_question_may_take() -> None:
    async with stuck_server() as address, front_of(address, question_timeout_s=0.1) as front:
        answer = await front.http.get("/v1/models")
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "DEADLINE_EXCEEDED"


async def test_a_server_that_computes_for_long_is_waited_for(served: RunningServer) -> None:
    """Longer than connecting and a question may take: several pings of the stream pass meanwhile."""
    held: list[GenerationRequest] = []

    def hold(request: GenerationRequest) -> Iterable[Event]:
        held.append(request)
        return ()

    async def answer(front: HttpFront) -> str:
        whole = await front.openai.chat.completions.create(**CHAT, max_tokens=2)
        return str(whole.choices[0].message.content)

    served.engine.script = hold
    times = {"connect_timeout_s": 0.1, "ping_interval_s": 0.05}
    async with front_of(served.server.address, **times) as front:
        waiting = asyncio.ensure_future(answer(front))
        async with front.http.stream(
            "POST", "/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 2}
        ) as streamed:
            lines = streamed.aiter_lines()
            for _ in range(4):
                while await anext(lines) != ": ping":
                    pass
            assert not waiting.done()
            for request in held:
                served.engine.publish(request, *counting(request))
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and await waiting == " w0 w1"
