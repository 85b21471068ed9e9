"""CacheService: Explain, Warm, Pin, Unpin, Evict, Verify, WatchStats; the long ones also with progress."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from icehouse.v1 import cache_policy_pb2, cache_service_pb2_grpc
from icehouse.v1 import cache_service_pb2 as messages

from icehouse_server.domain.cache_commands import (
    CacheCommand,
    Explain,
    Explanation,
    ListKnown,
    ListStored,
    Pin,
    PinReport,
    Unpin,
)
from icehouse_server.domain.events import Finished
from icehouse_server.domain.ids import AdapterName, CacheScope
from icehouse_server.domain.request import CacheUse
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCall
from icehouse_server.rpc.engine_client.answers import StallTimer
from icehouse_server.rpc.engine_client.engine_cache import EngineCache
from icehouse_server.rpc.messages.field_checks import check_model, refuse_value, tenant_of, watch_interval_of
from icehouse_server.rpc.messages.proto_map import to_proto
from icehouse_server.rpc.messages.responses import (
    cache_report_proto,
    evict_progress,
    explain_response,
    usage_proto,
    verify_progress,
    verify_response,
)
from icehouse_server.rpc.services.generation import ServiceParts
from icehouse_server.rpc.services.prompts import UncheckedPrompt, prompt_of


class _Scoped(Protocol):
    @property
    def adapter(self) -> str: ...
    @property
    def cache(self) -> cache_policy_pb2.CachePolicy: ...


def scope_of(request: _Scoped, call: RpcCall) -> CacheScope:
    """Return whose blocks a command is about; raises Forbidden. The adapter is checked with the prompt."""
    return CacheScope(tenant_of(request.cache, call.caller), AdapterName(request.adapter))


class CacheService(cache_service_pb2_grpc.CacheServiceServicer):
    """Turns calls into the cache's commands and their answers into responses."""

    def __init__(self, parts: ServiceParts) -> None:
        self._calls = parts.calls
        self._stall_timeout_s = parts.config.stall_timeout_s
        self._generation = parts.generation
        self._router = parts.router
        self._commands = EngineCache(engine=parts.engine, router=parts.router)
        self._stats = parts.stats

    async def Explain(self, request: messages.ExplainRequest, context: Context) -> messages.ExplainResponse:
        """Answer with what Generate would reuse."""
        async with self._calls.call(context) as call:
            scope = scope_of(request, call)
            shared = self._generation.shared_tenant_of(request.cache, call)
            shared_scope = None if shared is None else CacheScope(shared, scope.adapter)
            kind = request.WhichOneof("prompt")
            read = self._generation.read_prompt(request, kind, tenant=scope.tenant, call=call)
            token_ids, notes = await read
            explanation = await self._commands.ask(Explain(token_ids, scope, shared_scope), Explanation)
            return explain_response(explanation, prompt=token_ids, notes=notes)

    async def Warm(self, request: messages.WarmRequest, context: Context) -> messages.WarmResponse:
        """Run the prompt without output."""
        async with (
            self._calls.call(context) as call,
            contextlib.aclosing(self._warmed(request, call)) as told,
        ):
            async for response in told:
                if response.HasField("finished"):
                    return response.finished
        raise AssertionError("a request's events ended without Finished or Failed")

    # Written with context.write, as WatchStats is: otherwise a write that blocks could not be timed.
    async def WarmWithProgress(  # type: ignore[override]
        self, request: messages.WarmRequest, context: Context
    ) -> None:
        """Run the prompt without output and tell how far it is."""
        timer = StallTimer(timeout_s=self._stall_timeout_s)
        async with (
            self._calls.call(context) as call,
            timer.guard(),
            contextlib.aclosing(self._warmed(request, call, on_stall=timer.expire)) as told,
        ):
            async for response in told:
                await timer.write(context, response)

    async def _warmed(
        self, request: messages.WarmRequest, call: RpcCall, *, on_stall: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[messages.WarmWithProgressResponse, None]:
        """Yield the messages of a warm-up, `finished` last; closing the generator ends the request."""
        model = self._router.require_model()
        whole = self._generation.request_of(request, policy=request.cache, model=model, call=call)
        if whole.cache_use in (CacheUse.READ_ONLY, CacheUse.OFF):
            refuse_value("cache.use", whole.cache_use.name, "one that writes, for a warm-up")
        kind = request.WhichOneof("prompt")
        normalizes = self._generation.normalizes(whole.tenant)
        check = functools.partial(prompt_of, request, kind, model.info, normalizes=normalizes)
        prompt = UncheckedPrompt(check, request.ByteSize())
        prepared = await self._generation.prepare(whole, prompt, model, call)
        replies = prepared.new_replies()
        async with self._generation.run(prepared.requests, call=call, on_stall=on_stall) as events:
            async for index, event in events:
                if isinstance(event, Finished):
                    finished = messages.WarmResponse(
                        request_id=prepared.request.name,
                        cache=cache_report_proto(event.usage.cache, prepared.notes),
                        usage=usage_proto(event.usage),
                    )
                    yield messages.WarmWithProgressResponse(finished=finished)
                    return
                for response in replies.responses(index, event):
                    if response.HasField("started"):
                        yield messages.WarmWithProgressResponse(started=response.started)
                    elif response.HasField("prefill_progress"):
                        progress = response.prefill_progress
                        yield messages.WarmWithProgressResponse(prefill_progress=progress)

    async def Pin(self, request: messages.PinRequest, context: Context) -> messages.PinResponse:
        """Pin a prompt's blocks."""
        async with self._calls.call(context) as call:
            return to_proto(await self._change_pins(Pin, request, call), messages.PinResponse)

    async def Unpin(self, request: messages.UnpinRequest, context: Context) -> messages.UnpinResponse:
        """Take a prompt's pins off."""
        async with self._calls.call(context) as call:
            return to_proto(await self._change_pins(Unpin, request, call), messages.UnpinResponse)

    async def _change_pins(
        self,
        command: Callable[[tuple[int, ...], CacheScope], CacheCommand],
        request: messages.PinRequest | messages.UnpinRequest,
        call: RpcCall,
    ) -> PinReport:
        scope = scope_of(request, call)
        kind = request.WhichOneof("prompt")
        token_ids, _ = await self._generation.read_prompt(request, kind, tenant=scope.tenant, call=call)
        return await self._commands.ask(command(token_ids, scope), PinReport)

    async def Evict(self, request: messages.EvictRequest, context: Context) -> messages.EvictResponse:
        """Remove a prompt's blocks, or everything."""
        async with self._calls.call(context) as call:
            async for now in self._commands.evict(await self._target_of(request, call)):
                removed = now.report
            return to_proto(removed, messages.EvictResponse)

    async def EvictWithProgress(  # type: ignore[override]
        self, request: messages.EvictRequest, context: Context
    ) -> None:
        """Remove a prompt's blocks, or everything, and tell how far it is."""
        timer = StallTimer(timeout_s=self._stall_timeout_s)
        async with self._calls.call(context) as call, timer.guard():
            async for now in self._commands.evict(await self._target_of(request, call)):
                removed = now.report
                await timer.write(context, messages.EvictWithProgressResponse(progress=evict_progress(now)))
            await timer.write(
                context,
                messages.EvictWithProgressResponse(finished=to_proto(removed, messages.EvictResponse)),
            )

    async def _target_of(self, request: messages.EvictRequest, call: RpcCall) -> ListKnown:
        """Return which blocks to remove."""
        kind = request.WhichOneof("target")
        if kind is None:
            raise InvalidRequest(
                Reason.PROMPT_MISSING,
                "nothing is named to evict; set `text`, `chat`, `tokens` or `all`",
                field="target",
            )
        scope = scope_of(request, call)
        if kind == "all":
            if not request.all:
                refuse_value("all", False, "true; name a prompt to evict less")
            call.caller.require_operator("evicting everything")
            check_model(request.model, self._router.require_model().info)
            return ListKnown(None)
        token_ids, _ = await self._generation.read_prompt(request, kind, tenant=scope.tenant, call=call)
        return ListKnown(token_ids, scope)

    async def Verify(self, request: messages.VerifyRequest, context: Context) -> messages.VerifyResponse:
        """Have blocks on SSD read and compared."""
        async with self._calls.call(context):
            async for now in self._commands.verify(self._check_of(request)):
                found = now.report
            return verify_response(found)

    async def VerifyWithProgress(  # type: ignore[override]
        self, request: messages.VerifyRequest, context: Context
    ) -> None:
        """Have blocks on SSD read and compared, and tell how far it is."""
        timer = StallTimer(timeout_s=self._stall_timeout_s)
        async with self._calls.call(context), timer.guard():
            async for now in self._commands.verify(self._check_of(request)):
                found = now.report
                await timer.write(context, messages.VerifyWithProgressResponse(progress=verify_progress(now)))
            await timer.write(context, messages.VerifyWithProgressResponse(finished=verify_response(found)))

    def _check_of(self, request: messages.VerifyRequest) -> ListStored:
        """Return which blocks to read."""
        if request.block_limit < 0:
            refuse_value("block_limit", request.block_limit, ">= 0; 0 reads all")
        return ListStored(request.block_limit)

    async def WatchStats(  # type: ignore[override]
        self, request: messages.WatchStatsRequest, context: Context
    ) -> None:
        """Send counters until the caller ends it or the engine stops."""
        timer = StallTimer(timeout_s=self._stall_timeout_s)
        async with self._calls.call(context) as call, timer.guard():
            interval_s = watch_interval_of(request.interval, present=request.HasField("interval"))
            while True:
                await timer.write(context, await self._stats.watched(call.caller))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._router.left_ready.wait()
