"""Attacks of one hostile caller: ordinary calls, with or without credentials, at their worst.

Each attack runs until it is cancelled and checks nothing; `make bench CASE=attacks` measures its effect on
another tenant, and `tests/system/load/test_hostile.py` runs them briefly.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from icehouse.v1 import (
    cache_service_pb2,
    cache_service_pb2_grpc,
    inference_service_pb2_grpc,
    model_service_pb2,
    prompt_pb2,
    response_format_pb2,
    server_service_pb2,
    server_service_pb2_grpc,
)
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.config import ConnectionConfig

from tests.fixtures.rpc.http2 import Peer, framed, peer_of

CONNECTION_COUNT = 5
CALL_COUNT = ConnectionConfig().stream_limit
"""Calls on each connection: one with more calls is cut off."""
STREAM_COUNT = 1024
_ROUND_S = 20.0
"""How long an attack that holds places keeps them before it takes them again."""
_PAUSE_S = 0.01
_PRIORITY = 100
"""The highest there is."""

_STREAM = "/icehouse.v1.InferenceService/Stream"
_GENERATE = "/icehouse.v1.InferenceService/Generate"
_LIST = "/icehouse.v1.ModelService/ListModels"
_WATCH = "/icehouse.v1.ServerService/WatchStats"
_TOKENIZE = "/icehouse.v1.InferenceService/Tokenize"
_ARCHIVE = "/vllm.grpc.engine.VllmEngine/GetTokenizer"
_CHECK_HEALTH, _WATCH_HEALTH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"

_HEALTH_MESSAGE = framed(health_pb2.HealthCheckRequest().SerializeToString())
_LIST_MESSAGE = framed(model_service_pb2.ListModelsRequest().SerializeToString())
_STREAM_MESSAGE = framed(
    messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=2000).SerializeToString()
)
_TEXT_MESSAGE = framed(messages.TokenizeRequest(prompt={"text": "a " * (1 << 14)}).SerializeToString())
_HOURLY = server_service_pb2.WatchStatsRequest(interval={"seconds": 3600})
_OFTEN = server_service_pb2.WatchStatsRequest(interval={"nanos": 100_000_000})
"""The shortest interval there is."""
_BOMB = json.dumps({"type": "integer", "allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]})
_EXPRESSION = "(a|b|c|d){1,400}(x|y)*" * 4


class Hostile:
    """A hostile tenant. Its public methods are the attacks."""

    def __init__(self, address: str, token: str) -> None:
        self._address = address
        self._token = token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.begun = asyncio.Event()
        """Set once the first calls have been made."""
        self.ended = collections.Counter[str]()
        """Number of ended calls, by status."""

    async def nothing(self) -> None:
        """Attack nobody: the baseline for the attacks."""
        self.begun.set()
        await asyncio.Event().wait()

    async def unread_health_checks(self) -> None:
        """Health checks, without credentials, whose message never comes."""
        await self._holding(_CHECK_HEALTH, b"", token="")

    async def unread_health_watches(self) -> None:
        """Health watches, without credentials, on connections that accept no data."""
        await self._holding(_WATCH_HEALTH, _HEALTH_MESSAGE, window_bytes=0, token="")

    async def unread_requests(self) -> None:
        """Requests whose message never begins."""
        await self._holding(_GENERATE, b"", token=self._token)

    async def trickled_requests(self) -> None:
        """Requests of 16 MiB, sent a byte at a time."""
        async with self._connections(window_bytes=None) as peers:
            opened = [
                (peer, await peer.open_call(_GENERATE, token=self._token))
                for peer in peers
                for _ in range(CALL_COUNT)
            ]
            for peer, stream in opened:
                await peer.send(stream, b"\x00" + (16 << 20).to_bytes(4, "big"))
            self.begun.set()
            while True:
                for peer, stream in opened:
                    await peer.send(stream, b"\n")
                await asyncio.sleep(1.0)

    async def unread_calls(self) -> None:
        """Streams of 2,000 tokens that nobody reads, down to the socket."""
        await self._holding(_STREAM, _STREAM_MESSAGE, token=self._token, reads=False)

    async def zero_windows(self) -> None:
        """Streams on connections that allow no byte of an answer."""
        await self._holding(_STREAM, _STREAM_MESSAGE, window_bytes=0, token=self._token)

    async def zero_window_lists(self) -> None:
        """Short answers on connections that allow no byte of them."""
        await self._holding(_LIST, _LIST_MESSAGE, window_bytes=0, token=self._token)

    async def idle_watches(self) -> None:
        """WatchStats with an interval so long that nothing is sent for an hour."""
        await self._holding(_WATCH, framed(_HOURLY.SerializeToString()), token=self._token)

    async def watch_storms(self) -> None:
        """WatchStats ten times a second, as many as are admitted, and again when one is refused."""
        await self._asking("WatchStats", [_OFTEN], at_once=300, service="server")

    async def unread_archives(self) -> None:
        """GetTokenizer, on connections that allow no byte of the archive."""
        await self._holding(_ARCHIVE, framed(b""), window_bytes=0, token=self._token)

    async def unread_tokens(self) -> None:
        """Tokenize, whose answer is longer than the text, on connections that allow no byte of it."""
        await self._holding(_TOKENIZE, _TEXT_MESSAGE, window_bytes=0, token=self._token)

    async def giant_conversations(self) -> None:
        """Conversations of a million turns."""
        turns = [prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="a")] * 1_000_000
        chat = prompt_pb2.ChatPrompt(messages=turns)
        await self._asking("Generate", [messages.GenerateRequest(prompt={"chat": chat})], at_once=2)

    async def long_conversations(self) -> None:
        """Conversations of 8 MiB in a few turns."""
        turns = [
            prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content="a b " * (1 << 19)) for _ in range(4)
        ]
        chat = prompt_pb2.ChatPrompt(messages=turns)
        await self._asking("Generate", [messages.GenerateRequest(prompt={"chat": chat})], at_once=4)

    async def long_prompts(self) -> None:
        """Different prompts that fill the context, at the highest priority."""
        requests = [
            messages.GenerateRequest(
                prompt={"tokens": prompt_pb2.TokenPrompt(ids=[10 + index, *[11] * 60_000])},
                max_output_tokens=100,
                priority=_PRIORITY,
            )
            for index in range(32)
        ]
        await self._asking("Generate", requests, at_once=64)

    async def form_bombs(self) -> None:
        """Different response formats that are short to write and slow to compile."""
        forms = [response_format_pb2.ResponseFormat(json_schema=_BOMB + " " * i) for i in range(32)]
        forms += [response_format_pb2.ResponseFormat(regex=_EXPRESSION + "z" * i) for i in range(32)]
        requests = [messages.GenerateRequest(prompt={"text": "Hi"}, response_format=form) for form in forms]
        await self._asking("Generate", requests, at_once=16)

    async def order_floods(self) -> None:
        """Every command of the cache, as many as are admitted."""
        tokens = prompt_pb2.TokenPrompt(ids=[11] * 2000)
        orders = (
            ("Warm", cache_service_pb2.WarmRequest(prompt={"tokens": tokens})),
            ("Explain", cache_service_pb2.ExplainRequest(prompt={"tokens": tokens})),
            ("Pin", cache_service_pb2.PinRequest(prompt={"tokens": tokens})),
            ("Unpin", cache_service_pb2.UnpinRequest(prompt={"tokens": tokens})),
            ("Evict", cache_service_pb2.EvictRequest(prompt={"tokens": tokens})),
            ("Verify", cache_service_pb2.VerifyRequest()),
        )
        async with asyncio.TaskGroup() as together:
            for name, request in orders:
                together.create_task(self._asking(name, [request], at_once=60, service="cache"))

    async def stats_floods(self) -> None:
        """GetStats, as many as are admitted."""
        await self._asking("GetStats", [server_service_pb2.GetStatsRequest()], at_once=300, service="server")

    async def tokenize(self) -> None:
        """Tokenize of the longest accepted text, and of 16 MiB."""
        texts = ("a " * (1 << 18), "a " * ((8 << 20) - 64))
        requests = [messages.TokenizeRequest(prompt={"text": text}) for text in texts]
        await self._asking("Tokenize", requests, at_once=4)

    async def many_streams(self) -> None:
        """A thousand streams on one connection."""
        request = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=200)
        await self._asking("Stream", [request], at_once=STREAM_COUNT)

    async def urgent_completions(self) -> None:
        """A thousand requests of sixteen outputs each, at the highest priority."""
        request = messages.GenerateRequest(
            prompt={"text": "Hi"},
            max_output_tokens=2000,
            priority=_PRIORITY,
            completions=16,
            sampling={"temperature": 1},
        )
        await self._asking("Generate", [request], at_once=STREAM_COUNT)

    async def refused_calls(self) -> None:
        """Calls with an unknown token, as fast as they are refused."""
        stranger = Hostile(self._address, "x" * len(self._token))
        stranger.ended, stranger.begun = self.ended, self.begun
        await stranger._asking(
            "Generate", [messages.GenerateRequest(prompt={"text": "Hi"})], at_once=STREAM_COUNT
        )

    @contextlib.asynccontextmanager
    async def _connections(self, *, window_bytes: int | None) -> AsyncIterator[list[Peer]]:
        async with contextlib.AsyncExitStack() as opened:
            yield [
                await opened.enter_async_context(peer_of(self._address, window_bytes=window_bytes))
                for _ in range(CONNECTION_COUNT)
            ]

    async def _holding(
        self, path: str, message: bytes, *, token: str, window_bytes: int | None = None, reads: bool = True
    ) -> None:
        """Open as many calls as allowed, hold them for a while, and open new ones."""
        while True:
            with contextlib.suppress(ConnectionError, EOFError):
                async with self._connections(window_bytes=window_bytes) as peers:
                    for peer in peers:
                        for _ in range(CALL_COUNT):
                            stream = await peer.open_call(path, token=token)
                            if message:
                                await peer.send(stream, message, end=True)
                    self.begun.set()
                    await asyncio.gather(*(_stay(peer, reads=reads) for peer in peers))

    async def _asking(
        self, method: str, requests: Sequence[Any], *, at_once: int, service: str = "inference"
    ) -> None:
        """Keep so many calls running: send a new one when one has ended."""
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            stub: Any = {
                "cache": cache_service_pb2_grpc.CacheServiceStub,
                "inference": inference_service_pb2_grpc.InferenceServiceStub,
                "server": server_service_pb2_grpc.ServerServiceStub,
            }[service](channel)
            ask = getattr(stub, method)
            async with asyncio.TaskGroup() as together:
                for begin in range(at_once):
                    together.create_task(self._ask(ask, requests, begin))

    async def _ask(self, method: Callable[..., Any], requests: Sequence[Any], begin: int) -> None:
        index = begin
        while True:
            call = method(requests[index % len(requests)], metadata=self._metadata)
            self.begun.set()
            try:
                if hasattr(call, "read"):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                else:
                    await call
                self.ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.ended[error.code().name] += 1
            index += 1
            await asyncio.sleep(_PAUSE_S)


async def _stay(peer: Peer, *, reads: bool) -> None:
    if reads:
        await peer.quiet(_ROUND_S)
    else:
        await asyncio.sleep(_ROUND_S)


ATTACKS = tuple(name for name, value in vars(Hostile).items() if callable(value) and not name.startswith("_"))
