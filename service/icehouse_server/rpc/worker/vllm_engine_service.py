"""VllmEngine service: the worker protocol that gateways speak (SMG, llm-d), over the API's own services.

It maps a request to the API's and lets the API's services check and run it. Only what this protocol has in
addition is implemented here. The protocol is https://github.com/smg-project/smg's. Its requests name no
model, so each model has a service of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import grpc
from icehouse.v1 import embedding_service_pb2
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as messages
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from icehouse_server.domain.cache_commands import ListKnown
from icehouse_server.domain.call import Operation
from icehouse_server.domain.events import Delta, Event, Finished, FinishReason, PrefillProgress, Started
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState, ModelInfo
from icehouse_server.domain.request import GenerationRequest, Logprob, TokenLogprobs
from icehouse_server.errors import Cancelled, IcehouseError, InvalidRequest, Reason, Unimplemented
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCall
from icehouse_server.rpc.calls.wire import EncodedResponse
from icehouse_server.rpc.engine_client import answers
from icehouse_server.rpc.engine_client.answers import StallTimer
from icehouse_server.rpc.messages.field_checks import check_count
from icehouse_server.rpc.services.embedding_service import EmbeddingService
from icehouse_server.rpc.services.generation import Service, ServiceParts
from icehouse_server.rpc.services.inference_service import InferenceService
from icehouse_server.rpc.services.prepared import Prepared
from icehouse_server.rpc.worker.gateway_request import (
    LogprobsShown,
    WorkerRequest,
    input_ids_of,
    worker_request_of,
)
from icehouse_server.rpc.worker.worker_info import (
    WorkerParts,
    load_proto,
    model_info_proto,
    server_info_proto,
)
from icehouse_server.text.tokenizer_archive import TokenizerArchive

SERVICE_NAME = messages.DESCRIPTOR.services_by_name["VllmEngine"].full_name
ARCHIVE_CHUNK_BYTES = 64 << 10
"""Bytes of the archive in one message, which is also what gRPC buffers for a caller that does not read."""
ABORT_LIMIT = 256
"""Most names in one Abort; a gateway sends one name for each client that left."""
TENANT_KEY = "icehouse-tenant"
"""Metadata key that names a tenant, for operators and if no credentials are required."""


class VllmEngineService(Service):
    """Thin: a method reads the request, calls the rooms below, writes the answer. Owned by the event loop."""

    def __init__(
        self,
        parts: ServiceParts,
        *,
        model: str,
        serves: Callable[[str], bool],
        inference: InferenceService,
        embedding: EmbeddingService,
        parts_of: Mapping[str, WorkerParts],
    ) -> None:
        super().__init__(parts)
        self._model = model
        self._serves = serves
        self._inference = inference
        self._embedding = embedding
        self._parts_of = parts_of
        self._start_time = parts.clock.monotonic()
        self._request_times: dict[Tenant | None, float] = {}
        """When each tenant last sent a request; callers without credentials count as one."""
        self._archive: asyncio.Future[tuple[EncodedResponse, ...]] | None = None
        """The archive's messages, made once for all callers."""

    def add_to(self, server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: messages.GenerateRequest, context: Context) -> None:
        """Answer with chunks if the request is streamed, else with each whole output at its end."""
        timer = self._stall_timer()
        async with self._calls.call(context, Operation.TEXT_COMPLETION) as call:
            self._request_times[call.caller.tenant] = self._clock.wall()
            prepared, read = await self._prepare(request, call, context)
            replies = [
                WorkerReply(
                    each,
                    index=index,
                    is_streamed=request.stream,
                    shown=read.logprobs,
                    eos_token_ids=prepared.model.info.eos_token_ids,
                )
                for index, each in enumerate(prepared.completions)
            ]
            async with timer.guard():
                try:
                    await self._stream(prepared, replies, call=call, timer=timer, context=context)
                except Cancelled:  # by Abort, or by CancelRequest
                    for reply in replies:
                        if not reply.is_complete:
                            await timer.write(context, reply.aborted())

    async def _stream(
        self,
        prepared: Prepared,
        replies: list[WorkerReply],
        *,
        call: RpcCall,
        timer: StallTimer,
        context: Context,
    ) -> None:
        """Run the requests and write their events; raises Cancelled if one was cancelled."""
        async with self._generation.run(prepared.requests, call=call, on_stall=timer.expire) as events:
            async for index, event in events:
                for completion in prepared.completions_of(index):
                    responses = replies[completion].responses(event)
                    answers.count_buffered(sum(reply.buffered_bytes for reply in replies))
                    for response in responses:
                        await timer.write(context, response)

    async def _prepare(
        self, request: messages.GenerateRequest, call: RpcCall, context: Context
    ) -> tuple[Prepared, WorkerRequest]:
        _, model = await self._generation.use(self._model, call)
        read = worker_request_of(request, info=model.info, config=self._config)
        read.native.model = self._model
        # Checked like `cache.tenant` of the API.
        metadata = context.invocation_metadata() or ()
        read.native.cache.tenant = next((str(value) for key, value in metadata if key == TENANT_KEY), "")
        prepared = await self._inference.prepare(read.native, call, read_images=read.read_images)
        whole = dataclasses.replace(prepared.request, shows_markers=read.shows_markers)
        return dataclasses.replace(prepared, request=whole), read

    async def Embed(self, request: messages.EmbedRequest, context: Context) -> messages.EmbedResponse:
        async with self._calls.call(context, Operation.EMBEDDINGS) as call:
            self._request_times[call.caller.tenant] = self._clock.wall()
            if not request.HasField("tokenized"):
                raise InvalidRequest(
                    Reason.PROMPT_MISSING, "there is no input; set `tokenized`", field="tokenized"
                )
            native = embedding_service_pb2.EmbedRequest(request_id=request.request_id, model=self._model)
            _, model = await self._generation.use(self._model, call)
            ids = input_ids_of(request.tokenized, model.info)
            native.inputs.add().tokens.ids.extend(ids)
            response = await self._embedding.embed(native, call)
            values = response.embeddings[0].values
            return messages.EmbedResponse(
                embedding=values, prompt_tokens=response.prompt_tokens, embedding_dim=len(values)
            )

    async def HealthCheck(
        self, request: messages.HealthCheckRequest, context: Context
    ) -> messages.HealthCheckResponse:
        """Answer as the standard health service does for the model, once it has been loaded.

        Before that the call is refused: a gateway adds a worker after any answer, and never asks for its
        model's name again.
        """
        if self._seats.state in (EngineState.LOADING, EngineState.READY):
            async with self._calls.call(context) as call:
                await self._info(call)
                is_healthy = self._serves(self._model)
        else:
            is_healthy = False
        return messages.HealthCheckResponse(
            healthy=is_healthy, message="SERVING" if is_healthy else "NOT_SERVING"
        )

    async def Abort(self, request: messages.AbortRequest, context: Context) -> messages.AbortResponse:
        async with self._calls.call(context) as call:
            check_count("request_ids", len(request.request_ids), ABORT_LIMIT, "names")
            self._generation.open_requests.abort(set(request.request_ids), call.caller)
            return messages.AbortResponse()

    async def GetModelInfo(
        self, request: messages.GetModelInfoRequest, context: Context
    ) -> messages.GetModelInfoResponse:
        async with self._calls.call(context) as call:
            return model_info_proto(await self._info(call), self._parts)

    async def GetServerInfo(
        self, request: messages.GetServerInfoRequest, context: Context
    ) -> messages.GetServerInfoResponse:
        async with self._calls.call(context) as call:
            return server_info_proto(
                await self._info(call),
                self._parts,
                active_count=len(self._generation.open_requests.visible_to(call.caller)),
                uptime_s=self._clock.monotonic() - self._start_time,
                request_time=self._request_time(call.caller),
                image_limit=self._config.max_images,
            )

    async def _info(self, call: RpcCall) -> ModelInfo:
        """Return the model's facts. Loads the model if it never was; later it need not be in memory."""
        info = self._seats.find(self._model, call.caller).info
        if info is None:
            _, model = await self._generation.use(self._model, call)
            info = model.info
        return info

    @property
    def _parts(self) -> WorkerParts:
        """Parts of the model, which must have been loaded once."""
        return self._parts_of[self._model]

    def _request_time(self, caller: Caller) -> float:
        if caller.scope is None:
            return max(self._request_times.values(), default=0.0)
        return self._request_times.get(caller.scope, 0.0)

    async def GetLoads(
        self, request: messages.GetLoadsRequest, context: Context
    ) -> messages.GetLoadsResponse:
        async with self._calls.call(context) as call:
            now = datetime.datetime.fromtimestamp(self._clock.wall(), datetime.UTC)
            await self._info(call)
            loads = [self._load(call.caller.scope)]
            return messages.GetLoadsResponse(timestamp=now.isoformat(), dp_rank_count=1, loads=loads)

    def _load(self, scope: Tenant | None) -> messages.SchedulerLoad:
        """Return how busy one tenant, or all tenants, keep the server. Models compute in turns, so requests
        of other models count too."""
        tenants = self._observation.tenants
        latest = self._observation.latest
        return load_proto(
            tenants.total() if scope is None else tenants.use_of(scope),
            self._parts,
            None if scope is not None else (latest.models or {}).get(self._model, latest),
            waiting_token_count=self._generation.open_requests.waiting_token_count(scope),
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Answer with a zip of the tokenizer's files, in chunks, the last one with its SHA-256."""
        timer = self._stall_timer()
        async with self._calls.call(context) as call, timer.guard():
            await self._info(call)
            for chunk in await self._read_archive():
                await timer.write(context, chunk)

    async def _read_archive(self) -> tuple[EncodedResponse, ...]:
        """Return the archive's messages, made at the first call; concurrent calls wait for the same ones."""
        if self._archive is None or (self._archive.done() and self._archive.exception() is not None):
            self._archive = asyncio.ensure_future(
                self._prompts.run(lambda: archive_chunks(self._parts.read_archive()))
            )
        return await asyncio.shield(self._archive)

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: Context
    ) -> common.FlushCacheResponse:
        """Remove every block of the model from both tiers; requests in flight continue."""
        async with self._calls.call(context) as call:
            seat, _ = await self._generation.use(self._model, call)
            try:
                async for _ in seat.commands.evict(ListKnown(None)):
                    pass
            except IcehouseError as error:
                return common.FlushCacheResponse(success=False, message=error.message)
            return common.FlushCacheResponse(success=True, message="")

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """Send which blocks are cached, and how that changes, while the model is loaded.

        A subscription does not keep it loaded. A gateway returns with the number that it had: while the model
        is not loaded, it is refused and keeps what it knows; once it is loaded again, it starts over.
        """
        timer = self._stall_timer()
        async with self._calls.call(context) as call, timer.guard():
            self._seats.seat_of(self._model, call.caller)
            source = self._parts.kv_events
            if source is None:
                _unsupported("KV events")
            load = functools.partial(self._load, call.caller.scope)
            async with contextlib.aclosing(source.subscribe(request, call.caller, load)) as batches:
                # A gateway waits for the headers, and the first event may take long to come.
                await timer.begin(context)
                async for batch in batches:
                    await timer.write(context, batch)

    async def StartProfile(self, request: object, context: Context) -> common.ProfileResponse:
        """Refuse: use tracing instead."""
        async with self._calls.call(context):
            _unsupported("a profiler")

    StopProfile = StartProfile


def archive_chunks(archive: TokenizerArchive) -> tuple[EncodedResponse, ...]:
    """Return an archive's messages in order, the last one with its digest."""
    starts = range(0, len(archive.data), ARCHIVE_CHUNK_BYTES)
    chunks = [
        common.GetTokenizerChunk(data=archive.data[start : start + ARCHIVE_CHUNK_BYTES]) for start in starts
    ]
    chunks[-1].sha256 = archive.sha256_hex
    return tuple(EncodedResponse(chunk.SerializeToString()) for chunk in chunks)


def _unsupported(what: str) -> NoReturn:
    raise Unimplemented(Reason.METHOD_UNSUPPORTED, f"this worker has no {what}")


FINISH_REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_LENGTH: "length",
    FinishReason.TOOL_CALLS: "stop",
}
ABORTED = "abort"
_LOGPROB_BYTES = 120
"""About how much memory one takes as an object."""


class WorkerReply:
    """One output of a request. If it is streamed, new tokens are sent in chunks, otherwise all of them at the
    end."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        index: int,
        is_streamed: bool,
        shown: LogprobsShown,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._request = request
        self._index = index
        self._is_streamed = is_streamed
        self._shown = shown
        self._eos_token_ids = frozenset(eos_token_ids)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._cached_token_count = 0
        self._has_chunk = False
        self.buffered_bytes = 0
        """About how much memory it takes until its last message."""
        self.is_complete = False
        """Whether its last message has been made."""

    def responses(self, event: Event) -> list[messages.GenerateResponse]:
        match event:
            case Started():
                self._cached_token_count = event.cache.cached_token_count
            case PrefillProgress():
                self._buffer(self._prompt_logprobs, event.logprobs)
            case Delta():
                self._token_ids += event.token_ids
                if not self._is_streamed:
                    self._buffer(self._logprobs, event.logprobs)
                else:
                    return [messages.GenerateResponse(chunk=self._chunk(event))]
            case Finished():
                self._cached_token_count = event.usage.cache.cached_token_count
                return [messages.GenerateResponse(complete=self._finished(event))]
        return []

    def aborted(self) -> messages.GenerateResponse:
        return messages.GenerateResponse(complete=self._complete(ABORTED))

    def _buffer(self, buffer: list[TokenLogprobs], entries: Sequence[TokenLogprobs]) -> None:
        buffer += entries
        self.buffered_bytes += _LOGPROB_BYTES * sum(
            1 + len(entry.top) + len(entry.asked) for entry in entries
        )

    def _chunk(self, delta: Delta) -> messages.GenerateStreamChunk:
        is_first, self._has_chunk = not self._has_chunk, True
        return messages.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(self._request.prompt_token_ids),
            # Only of this chunk: the gateway adds them up.
            completion_tokens=len(delta.token_ids),
            cached_tokens=self._cached_token_count,
            output_logprobs=self._output_logprobs(delta.logprobs),
            input_logprobs=self._input_logprobs() if is_first else None,
            index=self._index,
        )

    def _finished(self, event: Finished) -> messages.GenerateComplete:
        complete = self._complete(FINISH_REASONS[event.reason])
        complete.spec_accepted_tokens = event.usage.drafts.accepted_count
        complete.spec_draft_tokens = event.usage.drafts.proposed_count
        if event.stop_string is not None:
            complete.matched_stop_str = event.stop_string
        elif event.stop_token_id is not None and event.stop_token_id not in self._eos_token_ids:
            # As in vLLM, the model's own end tokens are not reported.
            complete.matched_token_id = event.stop_token_id
        return complete

    def _complete(self, finish_reason: str) -> messages.GenerateComplete:
        self.is_complete = True
        return messages.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=self._cached_token_count,
            output_logprobs=None if self._is_streamed else self._output_logprobs(self._logprobs),
            input_logprobs=None if self._has_chunk else self._input_logprobs(),
            index=self._index,
        )

    def _output_logprobs(self, entries: Sequence[TokenLogprobs]) -> messages.OutputLogProbs | None:
        count = self._shown.output_top_count
        if count is None or not entries:
            return None
        return messages.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in entries],
            token_ids=[entry.token_id for entry in entries],
            top_logprobs=[_top(entry.top[:count]) for entry in entries] if count else (),
        )

    def _input_logprobs(self) -> messages.InputLogProbs | None:
        count = self._shown.prompt_top_count
        if count is None:
            return None
        # Nothing comes before the first token, so it has no log probability.
        first = self._request.prompt_token_ids[0]
        entries = self._prompt_logprobs
        return messages.InputLogProbs(
            token_logprobs=[
                messages.InputTokenLogProb(),
                *(messages.InputTokenLogProb(value=entry.logprob) for entry in entries),
            ],
            token_ids=[first, *(entry.token_id for entry in entries)],
            top_logprobs=[messages.TopLogProbs(), *(_top(entry.top[:count]) for entry in entries)]
            if count
            else (),
        )


def _top(entries: Sequence[Logprob]) -> messages.TopLogProbs:
    return messages.TopLogProbs(
        values=[entry.logprob for entry in entries], token_ids=[entry.token_id for entry in entries]
    )
