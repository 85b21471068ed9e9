"""ServerService: the server and its requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator

from icehouse.v1 import server_service_pb2 as messages
from icehouse.v1 import server_service_pb2_grpc

from icehouse_server.config import Config
from icehouse_server.domain.model import EngineState
from icehouse_server.rpc.calls.call_lifecycle import Context
from icehouse_server.rpc.calls.wire import EncodedResponse
from icehouse_server.rpc.engine_client.open_requests import ListedRequest
from icehouse_server.rpc.messages.field_checks import (
    TOP_LOGPROB_COUNT_LIMIT,
    check_name,
    page_size_of,
    refuse_value,
    watch_interval_of,
)
from icehouse_server.rpc.messages.proto_map import duration_proto, enum_proto
from icehouse_server.rpc.services.generation import Service, ServiceParts

_STATES = {
    EngineState.LOADING: messages.SERVER_STATE_LOADING,
    EngineState.READY: messages.SERVER_STATE_READY,
    EngineState.DRAINING: messages.SERVER_STATE_DRAINING,
    EngineState.STOPPED: messages.SERVER_STATE_FAILED,
    EngineState.FAILED: messages.SERVER_STATE_FAILED,
}


class ServerService(Service, server_service_pb2_grpc.ServerServiceServicer):
    """The server and its requests. Owned by the event loop."""

    def __init__(self, parts: ServiceParts, server: messages.Server) -> None:
        super().__init__(parts)
        self._requests = parts.generation.open_requests
        self._start_time = parts.clock.monotonic()
        self._server = server

    async def GetServer(
        self, request: messages.GetServerRequest, context: Context
    ) -> messages.GetServerResponse:
        async with self._calls.call(context):
            uptime = duration_proto(self._clock.monotonic() - self._start_time)
            server = messages.Server(state=_STATES[self._seats.state], uptime=uptime)
            server.MergeFrom(self._server)
            return messages.GetServerResponse(server=server)

    async def GetStats(  # type: ignore[override]
        self, request: messages.GetStatsRequest, context: Context
    ) -> EncodedResponse:
        async with self._calls.call(context) as call:
            return await self._observation.answer(call.caller)

    async def WatchStats(  # type: ignore[override]
        self, request: messages.WatchStatsRequest, context: Context
    ) -> None:
        """Send counters until the caller ends the stream or the engine stops."""
        timer = self._stall_timer()
        async with self._calls.call(context) as call, timer.guard():
            interval_s = watch_interval_of(request.interval, present=request.HasField("interval"))
            while True:
                await timer.write(context, await self._observation.answer(call.caller))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._seats.ended.wait()

    async def ListRequests(
        self, request: messages.ListRequestsRequest, context: Context
    ) -> messages.ListRequestsResponse:
        async with self._calls.call(context) as call:
            page_size = page_size_of(request.page_size)
            after = number_of(request.page_token)
            listed = [r for r in self._requests.visible_to(call.caller) if r.number > after]
            page = listed[:page_size]
            return messages.ListRequestsResponse(
                requests=[self._info_of(each) for each in page],
                next_page_token=str(page[-1].number) if len(listed) > page_size else "",
            )

    async def CancelRequest(
        self, request: messages.CancelRequestRequest, context: Context
    ) -> messages.CancelRequestResponse:
        async with self._calls.call(context) as call:
            if not request.request_id:
                refuse_value("request_id", "", "the id of a request that waits or runs")
            name = check_name("request_id", request.request_id)
            tenant = request.tenant if request.HasField("tenant") else None
            ended = self._requests.cancel(name, call.caller, tenant=tenant)
            return messages.CancelRequestResponse(request=self._info_of(ended))

    def _info_of(self, request: ListedRequest) -> messages.RequestInfo:
        first = request.first
        return messages.RequestInfo(
            request_id=first.name,
            method=request.method,
            tenant=first.tenant,
            session_id=first.session_id,
            adapter=first.adapter,
            phase=enum_proto(request.phase, messages.RequestPhase),
            age=duration_proto(self._clock.monotonic() - first.arrival_time),
            part_count=request.part_count,
            prompt_tokens=request.prompt_token_count,
            cached_tokens=request.cached_token_count,
            output_tokens=request.output_token_count,
            max_output_tokens=first.max_output_tokens,
            model=request.model_id,
        )


def server_proto(config: Config) -> messages.Server:
    """Return what the configuration says about a server; it does not change while the server runs."""
    server = config.server
    return messages.Server(
        version=server_version(),
        features=_features_of(config),
        limits=messages.ServerLimits(
            max_message_bytes=server.max_message_bytes,
            max_output_tokens=server.max_output_tokens_limit,
            default_max_output_tokens=server.default_max_output_tokens,
            max_completions=server.max_completions,
            max_stop_strings=server.max_stop_count,
            max_stop_bytes=server.max_stop_bytes,
            max_top_logprobs=TOP_LOGPROB_COUNT_LIMIT,
            max_response_format_bytes=server.max_grammar_bytes,
            max_embedding_inputs=server.max_embedding_inputs,
            max_rerank_documents=server.max_rerank_documents,
            max_concurrent_calls=server.max_concurrent_calls,
        ),
    )


def _features_of(config: Config) -> Iterator[messages.ServerFeature.ValueType]:
    cache = config.cache
    features = {
        messages.SERVER_FEATURE_PREFIX_CACHE: cache.enabled,
        messages.SERVER_FEATURE_SSD_CACHE: cache.has_ssd,
        messages.SERVER_FEATURE_CACHE_ENCRYPTION: cache.has_ssd and cache.is_encrypted,
        messages.SERVER_FEATURE_CREDENTIALS: config.security.authenticates,
        messages.SERVER_FEATURE_DRAFT_MODEL: config.model.draft_model is not None,
        messages.SERVER_FEATURE_WORKER: config.fleet.worker_enabled,
    }
    return (feature for feature, is_there in features.items() if is_there)


@functools.cache
def server_version() -> str:
    """Return the installed version; "source" in a checkout that was never installed."""
    try:
        return importlib.metadata.version("icehouse")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def number_of(page_token: str) -> int:
    """Return the number at which the previous page ended; 0 for the first page."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdecimal() and len(page_token) < 20):
        refuse_value("page_token", page_token, "the `next_page_token` of the page before, or absent")
    return int(page_token)
