"""The synchronous client. Safe for use from several threads."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
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

from icehouse_client.cache_client import CacheClient, CacheTimeouts
from icehouse_client.calls import Calls, ResponseCall, ending
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

Interceptor = grpc.UnaryUnaryClientInterceptor | grpc.UnaryStreamClientInterceptor
"""What may stand between the client and its channel: its calls have one request, and one answer or many."""


class Client:
    """A connection to one server; `address` is "host:port" or "unix:/path".

    `timeout_s` is the deadline of calls that name none; those that may be long (`cache.warm`, `evict`,
    `evict_all`, `verify`, `export_archive`, `import_archive`) have `command_timeout_s` instead, and none
    where `timeout_s` is None. Every method raises IcehouseClientError. A Generate that no server took is
    tried again as the published service config says, streams never. `retry_limit`: how often `generate`,
    `chat`, `embed` and `rerank` are sent again where the server refuses them for now and says when
    (`RetryPolicy`).
    Set `watches_health` to False for servers that answer health checks with credentials only. `interceptors`
    are gRPC's own, of `grpc.intercept_channel`: the first one is outermost, and sees each attempt as a call.
    `channel_options` are arguments of gRPC's channel, such as ("grpc.max_reconnect_backoff_ms", 2000).
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        command_timeout_s: float | None = DEFAULT_COMMAND_TIMEOUT_S,
        retry_limit: int = 0,
        security: Security = NO_SECURITY,
        watches_health: bool = True,
        interceptors: Sequence[Interceptor] = (),
        channel_options: ChannelOptions = (),
    ) -> None:
        self._timeout_s = timeout_s
        self._retries = RetryPolicy(retry_limit)
        self._command_timeout_s = command_timeout_s
        self._calls = Calls(BearerToken(security.token))
        channel = open_channel(address, security, watches_health=watches_health, options=channel_options)
        self._channel = grpc.intercept_channel(channel, *interceptors) if interceptors else channel
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._embeddings = embedding_service_pb2_grpc.EmbeddingServiceStub(self._channel)
        self._reranking = rerank_service_pb2_grpc.RerankServiceStub(self._channel)
        self._server = server_service_pb2_grpc.ServerServiceStub(self._channel)
        # Its types know no methods.
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self.cache = CacheClient(self._channel, self._calls, CacheTimeouts(timeout_s, command_timeout_s))
        """The server's prefix cache: warm, explain, pin, unpin, evict, verify."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Begin to connect now, and not with the first call; returns at once."""

        def ignore(state: grpc.ChannelConnectivity) -> None: ...

        self._channel.subscribe(ignore, try_to_connect=True)
        self._channel.unsubscribe(ignore)

    def close(self) -> None:
        """End the connection and what runs on it."""
        self._channel.close()

    def with_metadata(self, metadata: Mapping[str, str]) -> Self:
        """Return a client on the same connection whose calls carry this too; `close` ends both.

        An "authorization" of the caller's own goes in place of the token.
        """
        view = copy.copy(self)
        view._calls = self._calls.with_metadata(tuple(metadata.items()))
        times = CacheTimeouts(self._timeout_s, self._command_timeout_s)
        view.cache = CacheClient(self._channel, view._calls, times)
        return view

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Reply:
        """Return the whole output."""
        request = generate_request(prompt, options)

        def attempt(left_s: float | None) -> Reply:
            return reply_from(self._calls.unary(self._inference.Generate, request, left_s))

        return self._retries.run(attempt, self._deadline(options))

    def chat(self, messages: Sequence[Turn], **options: Unpack[Options]) -> Reply:
        """Return the assistant's next turn; `tools` are functions that it may ask to be called."""
        check_is_chat(messages)
        return self.generate(messages, **options)

    @overload
    def generate_json(
        self, prompt: Prompt, output_type: type[Value], **options: Unpack[Options]
    ) -> Value: ...

    @overload
    def generate_json(self, prompt: Prompt, output_type: object, **options: Unpack[Options]) -> Any: ...

    def generate_json(self, prompt: Prompt, output_type: object, **options: Unpack[Options]) -> Any:
        """Return an output as a value of a type: a dataclass, a TypedDict, a pydantic model, a list of them.

        The output is held to `schema_of(output_type)`, unless `response_format` says to what. Raises
        OutputError for one that a limit cut or that does not fit; `generate` and `Reply.decode` do the same
        where the reply itself is wanted. Raises TypeError, before any call, for a type without a schema.
        """
        reply = self.generate(prompt, **typed_options(options, output_type))
        return reply.decode(output_type)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Return the output as it comes: iterate over its text, then look at `reply`."""
        request = generate_request(prompt, options)
        call = self._calls.stream(self._inference.Stream, request, self._deadline(options))
        return Stream(call, completion_count=request.completions)

    def embed(self, inputs: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """Return a vector for each input, a text or token ids."""
        request = embed_request(inputs, options)

        def attempt(left_s: float | None) -> Embeddings:
            return Embeddings.of(self._calls.unary(self._embeddings.Embed, request, left_s))

        return self._retries.run(attempt, options.get("timeout_s", self._timeout_s))

    def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> Ranking:
        """Return the documents in the order in which they answer the query, best first."""
        request = rerank_request(query, documents, options)

        def attempt(left_s: float | None) -> Ranking:
            return Ranking.of(self._calls.unary(self._reranking.Rerank, request, left_s))

        return self._retries.run(attempt, options.get("timeout_s", self._timeout_s))

    def tokenize(
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
            response = self._calls.unary(self._inference.Tokenize, request, timeout_s or self._timeout_s)
        return tokens_from(response)

    def cache_stats(self, *, timeout_s: float | None = None) -> inference.CacheStatsResponse:
        """Return the prefix cache's counters, for operators, as the API's own message."""
        with translated():
            return self._calls.unary(
                self._inference.CacheStats, inference.CacheStatsRequest(), timeout_s or self._timeout_s
            )

    def stats(self, *, timeout_s: float | None = None) -> server_service_pb2.ServerStats:
        """Return the server's counters, of which a tenant sees its own share, as the API's own message."""
        request = server_service_pb2.GetStatsRequest()
        with translated():
            response = self._calls.unary(self._server.GetStats, request, timeout_s or self._timeout_s)
        return response.stats

    def watch_stats(
        self, *, interval_s: float | None = None, waits: bool = False
    ) -> Generator[server_service_pb2.ServerStats, None, None]:
        """Iterate over the counters of `stats`, now and then at an interval, until the iteration is left.

        With `waits` a server that is not there is waited for.
        """
        request = watch_request(interval_s)
        watch = self._calls.stream(self._server.WatchStats, request, None, waits=waits)
        with translated(), ending(watch) as call:
            for response in call:
                yield response.stats

    def models(self, *, timeout_s: float | None = None) -> list[model_service_pb2.Model]:
        """Return the served models, as the API's own messages."""
        request = model_service_pb2.ListModelsRequest()
        with translated():
            response = self._calls.unary(self._models.ListModels, request, timeout_s or self._timeout_s)
        return list(response.models)

    def load_model(
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
            for last in call:
                if last.HasField("progress"):
                    on_progress(last.progress)
        return last.done

    def unload_model(self, model: str, *, timeout_s: float | None = None) -> model_service_pb2.Model:
        """Have a model unloaded once its requests have ended; return it. Operators only."""
        request = model_service_pb2.UnloadModelRequest(model=model)
        with translated():
            return self._calls.unary(self._models.UnloadModel, request, timeout_s).model

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = None) -> str:
        """Return the text of tokens."""
        request = inference.DetokenizeRequest(model=model, token_ids=token_ids)
        with translated():
            response = self._calls.unary(self._inference.Detokenize, request, timeout_s or self._timeout_s)
        return response.text

    def server(self, *, timeout_s: float | None = None) -> server_service_pb2.Server:
        """Return the server's version, features and limits, as the API's own message."""
        request = server_service_pb2.GetServerRequest()
        with translated():
            response = self._calls.unary(self._server.GetServer, request, timeout_s or self._timeout_s)
        return response.server

    def health(self, service: str = SERVICE, *, timeout_s: float | None = None) -> str:
        """Return what the server says of a service: SERVING, NOT_SERVING."""
        with translated():
            response = self._calls.unary(
                self._health.Check, HealthCheckRequest(service=service), timeout_s or self._timeout_s
            )
        return HealthCheckResponse.ServingStatus.Name(response.status)

    def wait_until_serving(self, *, timeout_s: float | None = None) -> server_service_pb2.Server:
        """Return the server once it takes requests, be it not even there yet.

        DEADLINE_EXCEEDED when late, with what came last in the message.
        """
        request = server_service_pb2.GetServerRequest()

        def ask(left_s: float | None) -> server_service_pb2.Server:
            return self._calls.unary(self._server.GetServer, request, left_s).server

        return ReadinessWait(self._timeout_s if timeout_s is None else timeout_s).run(ask)

    def requests(self, *, timeout_s: float | None = None) -> list[server_service_pb2.RequestInfo]:
        """Return the requests that wait or run, the oldest first: an operator's sees those of all tenants."""
        found: list[server_service_pb2.RequestInfo] = []
        request = server_service_pb2.ListRequestsRequest(page_size=1000)
        with translated():
            while True:
                page = self._calls.unary(self._server.ListRequests, request, timeout_s or self._timeout_s)
                found += page.requests
                if not page.next_page_token:
                    return found
                request.page_token = page.next_page_token

    def cancel(
        self, request_id: str, *, tenant: str | None = None, timeout_s: float | None = None
    ) -> server_service_pb2.RequestInfo:
        """End a request, another caller's too for operators; return what it was. Where several tenants
        have one of this id, operators say whose."""
        request = server_service_pb2.CancelRequestRequest(request_id=request_id, tenant=tenant)
        with translated():
            response = self._calls.unary(self._server.CancelRequest, request, timeout_s or self._timeout_s)
        return response.request

    def _deadline(self, options: Options) -> float | None:
        return timeout_of(options, default_s=self._timeout_s)


def open_channel(
    address: str, security: Security, *, watches_health: bool, options: ChannelOptions
) -> grpc.Channel:
    """Return a channel, secured as `security` says."""
    check_address(address)
    options = channel_options(address, security, watches_health=watches_health, more=options)
    credentials = security.credentials
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


class Stream:
    """A running output: an iterator over its pieces of text, of several completions over the first one's.

    `reply` is the whole, once the iteration has ended. Leaving the iteration or the `with` block early
    cancels it; what is left of it cannot be iterated over again.
    """

    def __init__(self, call: ResponseCall[inference.StreamResponse], *, completion_count: int = 0) -> None:
        self._call = call
        self._sum = StreamSum(completion_count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[str]:
        with contextlib.closing(self.indexed()) as pieces:
            yield from (text for index, text in pieces if index == 0)

    def indexed(self) -> Generator[tuple[int, str], None, None]:
        """Iterate over the text of all completions, each piece with its completion's index."""
        with contextlib.closing(self.events()) as events:
            for response in events:
                if response.HasField("delta") and response.delta.text:
                    yield response.delta.completion_index, response.delta.text

    def events(self) -> Generator[StreamEvent, None, None]:
        """Iterate over the API's own messages: how far the prompt is, reasoning and calls as they come."""
        try:
            with translated():
                for response in self._call:
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
