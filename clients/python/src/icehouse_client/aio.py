"""The asyncio client. Belongs to the event loop it was made on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, overload

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from icehouse.v1 import (
    embedding_service_pb2_grpc,
    inference_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    rerank_service_pb2_grpc,
    server_service_pb2,
    server_service_pb2_grpc,
)
from icehouse.v1 import inference_service_pb2 as inference

from icehouse_client.cache_client import AsyncCacheClient, CacheTimeouts
from icehouse_client.calls import AsyncCalls, AsyncResponseCall, ending
from icehouse_client.channel import SERVICE, channel_options, check_address
from icehouse_client.chat import Infill
from icehouse_client.embeddings import Embeddings, EmbedOptions, embed_request
from icehouse_client.errors import translated
from icehouse_client.message_dicts import Turn, check_is_chat
from icehouse_client.output_types import typed_options
from icehouse_client.readiness import ReadinessWait
from icehouse_client.requests import (
    DEFAULT_COMMAND_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    OnProgress,
    Options,
    Prompt,
    generate_request,
    timeout_of,
    tokenize_request,
    watch_request,
)
from icehouse_client.reranking import Ranking, RerankOptions, rerank_request
from icehouse_client.results import Reply, Started, Token, Value, reply_from, tokens_from
from icehouse_client.retries import RetryPolicy
from icehouse_client.security import NO_SECURITY, ChannelOptions, Security
from icehouse_client.stream_sum import StreamEvent, StreamSum
from icehouse_client.tokens import BearerToken
from icehouse_client.tool_dicts import GivenTool


class AsyncClient:
    """As `Client`, with awaitable methods, and with interceptors of `grpc.aio`."""

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        command_timeout_s: float | None = DEFAULT_COMMAND_TIMEOUT_S,
        retry_limit: int = 0,
        security: Security = NO_SECURITY,
        watches_health: bool = True,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
        channel_options: ChannelOptions = (),
    ) -> None:
        self._timeout_s = timeout_s
        self._retries = RetryPolicy(retry_limit)
        self._command_timeout_s = command_timeout_s
        self._calls = AsyncCalls(BearerToken(security.token))
        self._channel = _open_channel(
            address,
            security,
            watches_health=watches_health,
            interceptors=interceptors,
            options=channel_options,
        )
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._embeddings = embedding_service_pb2_grpc.EmbeddingServiceStub(self._channel)
        self._reranking = rerank_service_pb2_grpc.RerankServiceStub(self._channel)
        self._server = server_service_pb2_grpc.ServerServiceStub(self._channel)
        # Its types know no methods.
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        times = CacheTimeouts(timeout_s, command_timeout_s)
        self.cache = AsyncCacheClient(self._channel, self._calls, times)
        """The server's prefix cache: warm, explain, pin, unpin, evict, verify."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def connect(self) -> None:
        """As `Client.connect`."""
        self._channel.get_state(try_to_connect=True)

    async def close(self) -> None:
        """End the connection and what runs on it."""
        await self._channel.close()

    def with_metadata(self, metadata: Mapping[str, str]) -> Self:
        """As `Client.with_metadata`."""
        view = copy.copy(self)
        view._calls = self._calls.with_metadata(tuple(metadata.items()))
        times = CacheTimeouts(self._timeout_s, self._command_timeout_s)
        view.cache = AsyncCacheClient(self._channel, view._calls, times)
        return view

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Reply:
        """Return the whole output."""
        request = generate_request(prompt, options)

        async def attempt(left_s: float | None) -> Reply:
            return reply_from(await self._calls.unary(self._inference.Generate, request, left_s))

        return await self._retries.run_async(attempt, self._deadline(options))

    async def chat(self, messages: Sequence[Turn], **options: Unpack[Options]) -> Reply:
        """Return the assistant's next turn; `tools` are functions that it may ask to be called."""
        check_is_chat(messages)
        return await self.generate(messages, **options)

    @overload
    async def generate_json(
        self, prompt: Prompt, output_type: type[Value], **options: Unpack[Options]
    ) -> Value: ...

    @overload
    async def generate_json(self, prompt: Prompt, output_type: object, **options: Unpack[Options]) -> Any: ...

    async def generate_json(self, prompt: Prompt, output_type: object, **options: Unpack[Options]) -> Any:
        """As `Client.generate_json`."""
        reply = await self.generate(prompt, **typed_options(options, output_type))
        return reply.decode(output_type)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Return the output as it comes: iterate over its text, then look at `reply`."""
        request = generate_request(prompt, options)
        call = self._calls.stream(self._inference.Stream, request, self._deadline(options))
        return AsyncStream(call, completion_count=request.completions)

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Return a vector for each input, a text or token ids."""
        request = embed_request(inputs, options)

        async def attempt(left_s: float | None) -> Embeddings:
            return Embeddings.of(await self._calls.unary(self._embeddings.Embed, request, left_s))

        return await self._retries.run_async(attempt, options.get("timeout_s", self._timeout_s))

    async def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> Ranking:
        """Return the documents in the order in which they answer the query, best first."""
        request = rerank_request(query, documents, options)

        async def attempt(left_s: float | None) -> Ranking:
            return Ranking.of(await self._calls.unary(self._reranking.Rerank, request, left_s))

        return await self._retries.run_async(attempt, options.get("timeout_s", self._timeout_s))

    async def tokenize(
        self,
        prompt: str | Sequence[Turn] | Infill,
        *,
        model: str = "",
        tools: Sequence[GivenTool] = (),
        timeout_s: float | None = None,
    ) -> list[Token]:
        """Return the tokens of a prompt."""
        request = tokenize_request(prompt, model=model, tools=tools)
        with translated():
            response = await self._calls.unary(
                self._inference.Tokenize, request, timeout_s or self._timeout_s
            )
        return tokens_from(response)

    async def cache_stats(self, *, timeout_s: float | None = None) -> inference.CacheStatsResponse:
        """Return the prefix cache's counters, for operators, as the API's own message."""
        with translated():
            return await self._calls.unary(
                self._inference.CacheStats, inference.CacheStatsRequest(), timeout_s or self._timeout_s
            )

    async def stats(self, *, timeout_s: float | None = None) -> server_service_pb2.ServerStats:
        """Return the server's counters, of which a tenant sees its own share, as the API's own message."""
        request = server_service_pb2.GetStatsRequest()
        with translated():
            response = await self._calls.unary(self._server.GetStats, request, timeout_s or self._timeout_s)
        return response.stats

    async def watch_stats(
        self, *, interval_s: float | None = None, waits: bool = False
    ) -> AsyncGenerator[server_service_pb2.ServerStats, None]:
        """Iterate over the counters of `stats`, now and then at an interval, until the iteration is left.

        With `waits` a server that is not there is waited for.
        """
        request = watch_request(interval_s)
        watch = self._calls.stream(self._server.WatchStats, request, None, waits=waits)
        with translated(), ending(watch) as call:
            async for response in call:
                yield response.stats

    async def models(self, *, timeout_s: float | None = None) -> list[model_service_pb2.Model]:
        """Return the served models, as the API's own messages."""
        request = model_service_pb2.ListModelsRequest()
        with translated():
            response = await self._calls.unary(self._models.ListModels, request, timeout_s or self._timeout_s)
        return list(response.models)

    async def load_model(
        self,
        model: str,
        *,
        fetch_only: bool = False,
        timeout_s: float | None = None,
        on_progress: OnProgress = lambda loading: None,
    ) -> model_service_pb2.Model:
        """Have a server of several models load one, or `fetch_only` its files; return it once that is done.
        Operators only.

        `on_progress` is told about once a second how far it is.
        """
        request = model_service_pb2.LoadModelRequest(model=model, fetch_only=fetch_only)
        load = self._calls.stream(self._models.LoadModel, request, timeout_s)
        with translated(), ending(load) as call:
            last = model_service_pb2.LoadModelResponse()
            async for last in call:
                if last.HasField("progress"):
                    on_progress(last.progress)
        return last.done

    async def unload_model(self, model: str, *, timeout_s: float | None = None) -> model_service_pb2.Model:
        """Have a model unloaded once its requests have ended; return it. Operators only."""
        request = model_service_pb2.UnloadModelRequest(model=model)
        with translated():
            return (await self._calls.unary(self._models.UnloadModel, request, timeout_s)).model

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None
    ) -> str:
        """Return the text of tokens."""
        request = inference.DetokenizeRequest(model=model, token_ids=token_ids)
        with translated():
            response = await self._calls.unary(
                self._inference.Detokenize, request, timeout_s or self._timeout_s
            )
        return response.text

    async def server(self, *, timeout_s: float | None = None) -> server_service_pb2.Server:
        """Return the server's version, features and limits, as the API's own message."""
        request = server_service_pb2.GetServerRequest()
        with translated():
            response = await self._calls.unary(self._server.GetServer, request, timeout_s or self._timeout_s)
        return response.server

    async def health(self, service: str = SERVICE, *, timeout_s: float | None = None) -> str:
        """Return what the server says of a service: SERVING, NOT_SERVING."""
        request = HealthCheckRequest(service=service)
        with translated():
            response = await self._calls.unary(self._health.Check, request, timeout_s or self._timeout_s)
        return HealthCheckResponse.ServingStatus.Name(response.status)

    async def wait_until_serving(self, *, timeout_s: float | None = None) -> server_service_pb2.Server:
        """As `Client.wait_until_serving`."""
        request = server_service_pb2.GetServerRequest()

        async def ask(left_s: float | None) -> server_service_pb2.Server:
            return (await self._calls.unary(self._server.GetServer, request, left_s)).server

        return await ReadinessWait(self._timeout_s if timeout_s is None else timeout_s).run_async(ask)

    async def requests(self, *, timeout_s: float | None = None) -> list[server_service_pb2.RequestInfo]:
        """Return the requests that wait or run, the oldest first: an operator's sees those of all tenants."""
        found: list[server_service_pb2.RequestInfo] = []
        request = server_service_pb2.ListRequestsRequest(page_size=1000)
        with translated():
            while True:
                page = await self._calls.unary(
                    self._server.ListRequests, request, timeout_s or self._timeout_s
                )
                found += page.requests
                if not page.next_page_token:
                    return found
                request.page_token = page.next_page_token

    async def cancel(
        self, request_id: str, *, tenant: str | None = None, timeout_s: float | None = None
    ) -> server_service_pb2.RequestInfo:
        """End a request, another caller's too for operators; return what it was. Where several tenants
        have one of this id, operators say whose."""
        request = server_service_pb2.CancelRequestRequest(request_id=request_id, tenant=tenant)
        with translated():
            response = await self._calls.unary(
                self._server.CancelRequest, request, timeout_s or self._timeout_s
            )
        return response.request

    def _deadline(self, options: Options) -> float | None:
        return timeout_of(options, default_s=self._timeout_s)


def _open_channel(
    address: str,
    security: Security,
    *,
    watches_health: bool,
    interceptors: Sequence[grpc.aio.ClientInterceptor],
    options: ChannelOptions,
) -> grpc.aio.Channel:
    check_address(address)
    options = channel_options(address, security, watches_health=watches_health, more=options)
    credentials = security.credentials
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


class AsyncStream:
    """As `Stream`, iterated with `async for`."""

    def __init__(
        self,
        call: AsyncResponseCall[inference.StreamResponse],
        *,
        completion_count: int = 0,
    ) -> None:
        self._call = call
        self._sum = StreamSum(completion_count)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        async with contextlib.aclosing(self.indexed()) as pieces:
            async for index, text in pieces:
                if index == 0:
                    yield text

    async def indexed(self) -> AsyncGenerator[tuple[int, str], None]:
        """Iterate over the text of all completions, each piece with its completion's index."""
        async with contextlib.aclosing(self.events()) as events:
            async for response in events:
                if response.HasField("delta") and response.delta.text:
                    yield response.delta.completion_index, response.delta.text

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Iterate over the API's own messages: how far the prompt is, reasoning and calls as they come."""
        try:
            with translated():
                async for response in self._call:
                    self._sum.add(response)
                    yield response
        finally:
            self.cancel()

    @property
    def started(self) -> Started | None:
        """What the server said when it began; None before the first text."""
        return self._sum.started

    @property
    def reply(self) -> Reply:
        """The whole output; raises ValueError before its end."""
        reply = self._sum.reply
        if reply is None:
            raise ValueError("the stream has not ended; iterate over it first")
        return reply

    def cancel(self) -> None:
        """End it on the server too. Harmless after the end."""
        self._call.cancel()
