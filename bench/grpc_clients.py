"""Clients of a running server: each has its own connection and reads one stream at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import grpc
from icehouse.v1 import (
    cache_policy_pb2,
    cache_service_pb2_grpc,
    inference_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    prompt_pb2,
    server_service_pb2,
    server_service_pb2_grpc,
)
from icehouse.v1 import inference_service_pb2 as messages

from bench.replies import Reply

NO_CACHE = cache_policy_pb2.CachePolicy(use=cache_policy_pb2.CACHE_USE_OFF)
READ_WRITE = cache_policy_pb2.CachePolicy(use=cache_policy_pb2.CACHE_USE_READ_WRITE)

_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Without this grpc would let all channels to one address share a connection."""


class Client:
    """One connection to the server. Belongs to one event loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OWN_CONNECTION)
        self.inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self.cache = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self.server = server_service_pb2_grpc.ServerServiceStub(self._channel)

    async def ready(self) -> None:
        """Connect."""
        await self._channel.channel_ready()

    async def close(self) -> None:
        """Disconnect."""
        await self._channel.close()

    async def model(self) -> model_service_pb2.Model:
        """Return the served model's facts."""
        answer = await self.models.GetModel(model_service_pb2.GetModelRequest())
        return answer.model

    async def stats(self) -> server_service_pb2.ServerStats:
        """Return the engine's and the cache's counters, taken between two steps."""
        return (await self.server.GetStats(server_service_pb2.GetStatsRequest())).stats

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens that the server makes of `text`."""
        answer = await self.inference.Tokenize(messages.TokenizeRequest(prompt={"text": text}))
        return [token.id for token in answer.tokens]

    async def stream(
        self, request: messages.GenerateRequest, *, heard: list[float] | None = None
    ) -> tuple[Reply, messages.Started, messages.Finished]:
        """Send one request and time each token as its message arrives.

        The times are also appended to `heard` as they come, for a concurrent reader.
        """
        times = [] if heard is None else heard
        ids: list[int] = []
        started, finished = messages.Started(), messages.Finished()
        start_time_s = time.perf_counter()
        async for response in self.inference.Stream(request):
            kind = response.WhichOneof("event")
            if kind == "delta":
                times += [time.perf_counter()] * len(response.delta.token_ids)
                ids += response.delta.token_ids
            elif kind == "started":
                started = response.started
            elif kind == "finished":
                finished = response.finished
        return Reply(start_time_s, tuple(times), tuple(ids)), started, finished


@contextlib.asynccontextmanager
async def connected(address: str, count: int) -> AsyncIterator[list[Client]]:
    """Yield so many clients of one server, each with its own connection."""
    clients = [Client(address) for _ in range(count)]
    await asyncio.gather(*(client.ready() for client in clients))
    try:
        yield clients
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def stream_together(
    clients: Sequence[Client], requests: Sequence[messages.GenerateRequest]
) -> list[Reply]:
    """Send one request from each client at the same moment and return the replies."""
    seen = await asyncio.gather(*(c.stream(r) for c, r in zip(clients, requests, strict=True)))
    return [reply for reply, _, _ in seen]


def text_request(
    text: str, *, max_output_tokens: int, cache: cache_policy_pb2.CachePolicy = NO_CACHE
) -> messages.GenerateRequest:
    """Return a greedy request for a text prompt."""
    return messages.GenerateRequest(prompt={"text": text}, max_output_tokens=max_output_tokens, cache=cache)


def token_request(
    token_ids: Sequence[int], *, max_output_tokens: int, cache: cache_policy_pb2.CachePolicy = NO_CACHE
) -> messages.GenerateRequest:
    """Return a greedy request for a prompt of tokens."""
    prompt = prompt_pb2.TokenPrompt(ids=token_ids)
    return messages.GenerateRequest(
        prompt={"tokens": prompt}, max_output_tokens=max_output_tokens, cache=cache
    )
