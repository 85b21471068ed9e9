"""The prefix cache of a server: `Client.cache` and `AsyncClient.cache`. Answers are the API's own messages.

Each prompt carries its prefix key, so that behind a load balancer an order reaches the server that a Generate
of the same prompt reaches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, TypedDict, TypeVar, Unpack

import grpc
from icehouse.v1 import cache_service_pb2 as messages
from icehouse.v1 import cache_service_pb2_grpc
from icehouse.v1 import inference_service_pb2 as inference

from icehouse_client.affinity import PromptRequest
from icehouse_client.cache import cache_policy
from icehouse_client.calls import AsyncCalls, Calls
from icehouse_client.errors import translated
from icehouse_client.options import refuse_unknown
from icehouse_client.requests import Prompt, PromptOptions, set_prompt
from icehouse_client.texts import names_bad_texts

Request = TypeVar("Request", bound=PromptRequest)


class WarmOptions(PromptOptions, total=False):
    """What may be said about a prompt to compute. Left out: the server's default."""

    request_id: str
    priority: int


class VerifyOptions(TypedDict, total=False):
    """What may be said about a check of the SSD tier."""

    block_limit: int
    """Most blocks to read; the next check goes on from there."""
    timeout_s: float | None


class EvictAllOptions(TypedDict, total=False):
    """What may be said about a removal of everything."""

    model: str
    timeout_s: float | None


TimedOptions = PromptOptions | VerifyOptions | EvictAllOptions
OnWarmProgress = Callable[[inference.PrefillProgress], object]
OnEvictProgress = Callable[[messages.EvictProgress], object]
OnVerifyProgress = Callable[[messages.VerifyProgress], object]


class CacheClient:
    """Looks into the prefix cache and gives it orders. Every method raises IcehouseClientError."""

    def __init__(self, channel: grpc.Channel, calls: Calls, times: CacheTimeouts) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._calls = calls
        self._times = times

    def warm(
        self, prompt: Prompt, *, on_progress: OnWarmProgress | None = None, **options: Unpack[WarmOptions]
    ) -> messages.WarmResponse:
        """Compute a prompt and keep it, without generating; `on_progress` is told how far it is."""
        request = warm_request(prompt, options)
        with translated():
            if on_progress is None:
                return self._calls.unary(self._stub.Warm, request, self._times.order(options))
            call = self._calls.stream(self._stub.WarmWithProgress, request, self._times.watch(options))
            with _ending(call):
                for response in call:
                    if response.HasField("prefill_progress"):
                        on_progress(response.prefill_progress)
        return response.finished

    def verify(
        self, *, on_progress: OnVerifyProgress | None = None, **options: Unpack[VerifyOptions]
    ) -> messages.VerifyResponse:
        """Have blocks on SSD read and compared, for operators; `on_progress` is told how far it is."""
        request = verify_request(options)
        with translated():
            if on_progress is None:
                return self._calls.unary(self._stub.Verify, request, self._times.order(options))
            call = self._calls.stream(self._stub.VerifyWithProgress, request, self._times.watch(options))
            with _ending(call):
                for response in call:
                    if response.HasField("progress"):
                        on_progress(response.progress)
        return response.finished

    def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.ExplainResponse:
        """Return what `generate` would reuse of a prompt."""
        request = order_request(messages.ExplainRequest(), prompt, options)
        with translated():
            return self._calls.unary(self._stub.Explain, request, self._times.soon(options))

    def pin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.PinResponse:
        """Keep a prompt's known blocks from being evicted by policy."""
        request = order_request(messages.PinRequest(), prompt, options)
        with translated():
            return self._calls.unary(self._stub.Pin, request, self._times.soon(options))

    def unpin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        request = order_request(messages.UnpinRequest(), prompt, options)
        with translated():
            return self._calls.unary(self._stub.Unpin, request, self._times.soon(options))

    def evict(
        self, prompt: Prompt, *, on_progress: OnEvictProgress | None = None, **options: Unpack[PromptOptions]
    ) -> messages.EvictResponse:
        """Remove a prompt's known blocks, pinned ones too; with `on_progress`, which is told how far it is,
        piece by piece, and no further once the call ends."""
        request = order_request(messages.EvictRequest(), prompt, options)
        return self._evict(request, options, on_progress)

    def evict_all(
        self, *, on_progress: OnEvictProgress | None = None, **options: Unpack[EvictAllOptions]
    ) -> messages.EvictResponse:
        """Remove every block of the model, for operators; as `evict` otherwise."""
        return self._evict(evict_all_request(options), options, on_progress)

    def watch_stats(
        self, *, interval_s: float | None = None, waits: bool = False
    ) -> Generator[inference.CacheStatsResponse, None, None]:
        """Iterate over the server's counters, now and then at an interval, until the iteration is left.

        With `waits` a server that is not there is waited for.
        """
        request = watch_request(interval_s)
        watch = self._calls.stream(self._stub.WatchStats, request, None, waits=waits)
        with translated(), _ending(watch) as call:
            for response in call:
                yield response.stats

    def _evict(
        self, request: messages.EvictRequest, options: TimedOptions, on_progress: OnEvictProgress | None
    ) -> messages.EvictResponse:
        with translated():
            if on_progress is None:
                return self._calls.unary(self._stub.Evict, request, self._times.order(options))
            call = self._calls.stream(self._stub.EvictWithProgress, request, self._times.watch(options))
            with _ending(call):
                for response in call:
                    if response.HasField("progress"):
                        on_progress(response.progress)
        return response.finished


class AsyncCacheClient:
    """As `CacheClient`, with awaitable methods."""

    def __init__(self, channel: grpc.aio.Channel, calls: AsyncCalls, times: CacheTimeouts) -> None:
        self._stub = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._calls = calls
        self._times = times

    async def warm(
        self, prompt: Prompt, *, on_progress: OnWarmProgress | None = None, **options: Unpack[WarmOptions]
    ) -> messages.WarmResponse:
        """Compute a prompt and keep it, without generating; `on_progress` is told how far it is."""
        request = warm_request(prompt, options)
        with translated():
            if on_progress is None:
                return await self._calls.unary(self._stub.Warm, request, self._times.order(options))
            call = self._calls.stream(self._stub.WarmWithProgress, request, self._times.watch(options))
            with _ending(call):
                async for response in call:
                    if response.HasField("prefill_progress"):
                        on_progress(response.prefill_progress)
        return response.finished

    async def verify(
        self, *, on_progress: OnVerifyProgress | None = None, **options: Unpack[VerifyOptions]
    ) -> messages.VerifyResponse:
        """Have blocks on SSD read and compared, for operators; `on_progress` is told how far it is."""
        request = verify_request(options)
        with translated():
            if on_progress is None:
                return await self._calls.unary(self._stub.Verify, request, self._times.order(options))
            call = self._calls.stream(self._stub.VerifyWithProgress, request, self._times.watch(options))
            with _ending(call):
                async for response in call:
                    if response.HasField("progress"):
                        on_progress(response.progress)
        return response.finished

    async def explain(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.ExplainResponse:
        """Return what `generate` would reuse of a prompt."""
        request = order_request(messages.ExplainRequest(), prompt, options)
        with translated():
            return await self._calls.unary(self._stub.Explain, request, self._times.soon(options))

    async def pin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.PinResponse:
        """Keep a prompt's known blocks from being evicted by policy."""
        request = order_request(messages.PinRequest(), prompt, options)
        with translated():
            return await self._calls.unary(self._stub.Pin, request, self._times.soon(options))

    async def unpin(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        request = order_request(messages.UnpinRequest(), prompt, options)
        with translated():
            return await self._calls.unary(self._stub.Unpin, request, self._times.soon(options))

    async def evict(
        self, prompt: Prompt, *, on_progress: OnEvictProgress | None = None, **options: Unpack[PromptOptions]
    ) -> messages.EvictResponse:
        """Remove a prompt's known blocks, pinned ones too; with `on_progress`, which is told how far it is,
        piece by piece, and no further once the call ends."""
        request = order_request(messages.EvictRequest(), prompt, options)
        return await self._evict(request, options, on_progress)

    async def evict_all(
        self, *, on_progress: OnEvictProgress | None = None, **options: Unpack[EvictAllOptions]
    ) -> messages.EvictResponse:
        """Remove every block of the model, for operators; as `evict` otherwise."""
        return await self._evict(evict_all_request(options), options, on_progress)

    async def watch_stats(
        self, *, interval_s: float | None = None, waits: bool = False
    ) -> AsyncGenerator[inference.CacheStatsResponse, None]:
        """Iterate over the server's counters, now and then at an interval, until the iteration is left.

        With `waits` a server that is not there is waited for.
        """
        request = watch_request(interval_s)
        watch = self._calls.stream(self._stub.WatchStats, request, None, waits=waits)
        with translated(), _ending(watch) as call:
            async for response in call:
                yield response.stats

    async def _evict(
        self, request: messages.EvictRequest, options: TimedOptions, on_progress: OnEvictProgress | None
    ) -> messages.EvictResponse:
        with translated():
            if on_progress is None:
                return await self._calls.unary(self._stub.Evict, request, self._times.order(options))
            call = self._calls.stream(self._stub.EvictWithProgress, request, self._times.watch(options))
            with _ending(call):
                async for response in call:
                    if response.HasField("progress"):
                        on_progress(response.progress)
        return response.finished


@dataclasses.dataclass(frozen=True, slots=True)
class CacheTimeouts:
    """The deadlines of one connection's calls; those that may be long have `order_timeout_s`."""

    timeout_s: float | None
    order_timeout_s: float | None

    def soon(self, options: PromptOptions) -> float | None:
        """Return the deadline of a call that is answered soon."""
        return options.get("timeout_s", self.timeout_s)

    def order(self, options: TimedOptions) -> float | None:
        """Return that of a call that may be long."""
        long_s = None if self.timeout_s is None else self.order_timeout_s
        return options.get("timeout_s", long_s)

    def watch(self, options: TimedOptions) -> float | None:
        """Return that of a call that tells how far it is: none unless one is named."""
        return options.get("timeout_s")


@contextlib.contextmanager
def _ending(call: Any) -> Iterator[Any]:
    """End the call on the server too, however the block is left."""
    try:
        yield call
    finally:
        call.cancel()


@names_bad_texts
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


def verify_request(options: VerifyOptions) -> messages.VerifyRequest:
    """Return the message of Verify."""
    refuse_unknown(options, VerifyOptions)
    return messages.VerifyRequest(block_limit=options.get("block_limit", 0))


def watch_request(interval_s: float | None) -> messages.WatchStatsRequest:
    """Return the message of WatchStats; None is the server's interval."""
    request = messages.WatchStatsRequest()
    if interval_s is not None:
        request.interval.FromNanoseconds(round(interval_s * 1e9))
    return request


@names_bad_texts
def evict_all_request(options: EvictAllOptions) -> messages.EvictRequest:
    """Return the message of an Evict of everything."""
    refuse_unknown(options, EvictAllOptions)
    return messages.EvictRequest(all=True, model=options.get("model", ""))


@names_bad_texts
def order_request(request: Request, prompt: Prompt, options: PromptOptions) -> Request:
    """Return the message of an order about a prompt, filled in."""
    refuse_unknown(options, PromptOptions)
    policy = cache_policy(options)
    if policy is not None:
        request.cache.CopyFrom(policy)
    set_prompt(request, prompt, options)
    return request
