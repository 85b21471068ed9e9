"""The prefix cache of a server: `Client.cache` and `AsyncClient.cache`. Answers are the API's own messages.

Each prompt carries its prefix key, so that behind a load balancer an order reaches the server that a Generate
of the same prompt reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

import grpc
from icehouse.v1 import cache_service_pb2 as messages
from icehouse.v1 import cache_service_pb2_grpc

from icehouse_client.affinity import PromptRequest, prefix_metadata
from icehouse_client.cache import cache_policy
from icehouse_client.errors import translated
from icehouse_client.options import refuse_unknown
from icehouse_client.requests import Prompt, PromptOptions, set_prompt, timeout_of
from icehouse_client.security import Metadata

Request = TypeVar("Request", bound=PromptRequest)


class WarmOptions(PromptOptions, total=False):
    """What may be said about a prompt to compute. Left out: the server's default."""

    request_id: str
    priority: int


class CacheClient:
    """Looks into the prefix cache and gives it orders. Every method raises IcehouseClientError."""

    def __init__(self, channel: grpc.Channel, *, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._calls = _Calls(metadata, timeout_s)

    def warm(self, prompt: Prompt, **options: Unpack[WarmOptions]) -> messages.WarmResponse:
        """Compute a prompt and keep it, without generating."""
        request = warm_request(prompt, options)
        with translated():
            return self._stub.Warm(request, **self._calls.arguments(request, options))

    def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.ExplainResponse:
        """Return what `generate` would reuse of a prompt."""
        request = order_request(messages.ExplainRequest(), prompt, options)
        with translated():
            return self._stub.Explain(request, **self._calls.arguments(request, options))

    def pin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.PinResponse:
        """Keep a prompt's known blocks from being evicted by policy."""
        request = order_request(messages.PinRequest(), prompt, options)
        with translated():
            return self._stub.Pin(request, **self._calls.arguments(request, options))

    def unpin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        request = order_request(messages.UnpinRequest(), prompt, options)
        with translated():
            return self._stub.Unpin(request, **self._calls.arguments(request, options))

    def evict(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.EvictResponse:
        """Remove a prompt's known blocks, pinned ones too."""
        request = order_request(messages.EvictRequest(), prompt, options)
        with translated():
            return self._stub.Evict(request, **self._calls.arguments(request, options))


class AsyncCacheClient:
    """As `CacheClient`, with awaitable methods."""

    def __init__(self, channel: grpc.aio.Channel, *, metadata: Metadata, timeout_s: float | None) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._calls = _Calls(metadata, timeout_s)

    async def warm(self, prompt: Prompt, **options: Unpack[WarmOptions]) -> messages.WarmResponse:
        """Compute a prompt and keep it, without generating."""
        request = warm_request(prompt, options)
        with translated():
            return await self._stub.Warm(request, **self._calls.arguments(request, options))

    async def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.ExplainResponse:
        """Return what `generate` would reuse of a prompt."""
        request = order_request(messages.ExplainRequest(), prompt, options)
        with translated():
            return await self._stub.Explain(request, **self._calls.arguments(request, options))

    async def pin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.PinResponse:
        """Keep a prompt's known blocks from being evicted by policy."""
        request = order_request(messages.PinRequest(), prompt, options)
        with translated():
            return await self._stub.Pin(request, **self._calls.arguments(request, options))

    async def unpin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        request = order_request(messages.UnpinRequest(), prompt, options)
        with translated():
            return await self._stub.Unpin(request, **self._calls.arguments(request, options))

    async def evict(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.EvictResponse:
        """Remove a prompt's known blocks, pinned ones too."""
        request = order_request(messages.EvictRequest(), prompt, options)
        with translated():
            return await self._stub.Evict(request, **self._calls.arguments(request, options))


class _Calls:
    """What goes with each call of one connection."""

    def __init__(self, metadata: Metadata, timeout_s: float | None) -> None:
        self._metadata = metadata
        self._timeout_s = timeout_s

    def arguments(self, request: PromptRequest, options: PromptOptions) -> Mapping[str, Any]:
        """Return the deadline and the headers of a call."""
        return {
            "timeout": timeout_of(options, default_s=self._timeout_s),
            "metadata": (*self._metadata, *prefix_metadata(request)),
        }


def warm_request(prompt: Prompt, options: WarmOptions) -> messages.WarmRequest:
    """Return the message of Warm."""
    refuse_unknown(options, WarmOptions)
    request = messages.WarmRequest(
        request_id=options.get("request_id", ""),
        priority=options.get("priority", 0),
        cache=cache_policy(options),
    )
    set_prompt(request, prompt, options)
    return request


def order_request(request: Request, prompt: Prompt, options: PromptOptions) -> Request:
    """Return the message of an order about a prompt, filled in."""
    refuse_unknown(options, PromptOptions)
    policy = cache_policy(options)
    if policy is not None:
        request.cache.CopyFrom(policy)
    set_prompt(request, prompt, options)
    return request
