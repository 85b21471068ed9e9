"""CacheService: commands to the prefix cache; the long ones are streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

from icehouse.v1 import cache_service_pb2 as messages
from icehouse.v1 import cache_service_pb2_grpc

from icehouse_server.domain.cache_commands import (
    EndSession,
    Explain,
    Explanation,
    ListKnown,
    ListStored,
    Pin,
    PinReport,
    SessionEndReport,
    Unpin,
)
from icehouse_server.domain.ids import AdapterName, CacheScope
from icehouse_server.domain.model import ModelState
from icehouse_server.domain.request import CacheUse
from icehouse_server.errors import InvalidRequest, Reason, Unavailable
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.calls.call_lifecycle import Context, RpcCall
from icehouse_server.rpc.engine_client.seat import Seat
from icehouse_server.rpc.messages.field_checks import (
    PromptMessage,
    check_name,
    pin_ttl_of,
    refuse_value,
    tenant_of,
)
from icehouse_server.rpc.messages.proto_map import to_proto
from icehouse_server.rpc.messages.responses import (
    evict_progress,
    explain_response,
    verify_progress,
    verify_result,
    warm_response,
)
from icehouse_server.rpc.services.cache_transfer import CacheTransfer
from icehouse_server.rpc.services.generation import Service, ServiceParts
from icehouse_server.rpc.services.prepared import Prepared


def scope_of(request: PromptMessage, call: RpcCall) -> CacheScope:
    """Return the scope of a command's blocks; raises Forbidden. The adapter is checked with the prompt."""
    return CacheScope(tenant_of(request.cache, call.caller), AdapterName(request.prompt.adapter))


class CacheService(Service, cache_service_pb2_grpc.CacheServiceServicer):
    """Turns calls into cache commands and their answers into responses."""

    def __init__(self, parts: ServiceParts) -> None:
        super().__init__(parts)
        self._transfer = CacheTransfer(prompts=self._prompts, timeout_s=self._config.stall_timeout_s)

    async def Explain(self, request: messages.ExplainRequest, context: Context) -> messages.ExplainResponse:
        async with self._calls.call(context) as call:
            scope = scope_of(request, call)
            shared = self._generation.shared_tenant_of(request.cache, call)
            shared_scope = None if shared is None else CacheScope(shared, scope.adapter)
            token_ids, notes = await self._generation.read_prompt(request, tenant=scope.tenant, call=call)
            explanation = await call.seat.commands.ask(Explain(token_ids, scope, shared_scope), Explanation)
            return explain_response(explanation, prompt=token_ids, notes=notes)

    async def Warm(  # type: ignore[override]
        self, request: messages.WarmRequest, context: Context
    ) -> None:
        timer = self._stall_timer()
        async with self._calls.call(context) as call:
            prepared = await self._prepare(request, call)
            running = self._generation.run(prepared.requests, call=call, on_stall=timer.expire)
            async with running as events, timer.guard():
                async for _, event in events:
                    response = warm_response(event, request_id=prepared.request.name, notes=prepared.notes)
                    if response is not None:
                        await timer.write(context, response)

    async def _prepare(self, request: messages.WarmRequest, call: RpcCall) -> Prepared:
        model = await self._generation.use_for(request, call)
        whole = self._generation.request_of(request, model=model, call=call)
        if whole.cache_use in (CacheUse.READ_ONLY, CacheUse.OFF):
            refuse_value("cache.use", whole.cache_use.name, "one that writes, for a warm-up")
        prompt = self._generation.unchecked(request.prompt, model, tenant=whole.tenant)
        return await self._generation.prepare(whole, prompt, model, call)

    async def Pin(self, request: messages.PinRequest, context: Context) -> messages.PinResponse:
        async with self._calls.call(context) as call:
            scope, token_ids = await self._read_prompt(request, call)
            order = Pin(token_ids, scope, pin_ttl_of(request.ttl, present=request.HasField("ttl")))
            return to_proto(await call.seat.commands.ask(order, PinReport), messages.PinResponse)

    async def Unpin(self, request: messages.UnpinRequest, context: Context) -> messages.UnpinResponse:
        async with self._calls.call(context) as call:
            scope, token_ids = await self._read_prompt(request, call)
            report = await call.seat.commands.ask(Unpin(token_ids, scope), PinReport)
            return to_proto(report, messages.UnpinResponse)

    async def EndSession(
        self, request: messages.EndSessionRequest, context: Context
    ) -> messages.EndSessionResponse:
        async with self._calls.call(context) as call:
            served = self._seats.find(request.model, call.caller)
            tenant = tenant_of(request.cache, call.caller)
            call.session_id = check_name("session_id", request.session_id or call.session_id)
            name = call.own_session_id
            if served.state is not ModelState.READY:
                return messages.EndSessionResponse()  # sessions are forgotten with the engine
            seat, _ = await self._generation.use(served.name, call)
            seat.prefetcher.forget(tenant, name)
            report = await seat.commands.ask(EndSession(name, tenant), SessionEndReport)
            return to_proto(report, messages.EndSessionResponse)

    async def Evict(  # type: ignore[override]
        self, request: messages.EvictRequest, context: Context
    ) -> None:
        async with self._calls.call(context) as call:
            scope, token_ids = await self._read_prompt(request, call)
            call.seat.prefetcher.forget(scope.tenant)
            await self._evict(call.seat, ListKnown(token_ids, scope), messages.EvictResponse, context)

    async def _read_prompt(
        self, request: messages.PinRequest | messages.UnpinRequest | messages.EvictRequest, call: RpcCall
    ) -> tuple[CacheScope, tuple[int, ...]]:
        """Return the scope of a command's blocks, and the tokens of its prompt."""
        scope = scope_of(request, call)
        token_ids, _ = await self._generation.read_prompt(request, tenant=scope.tenant, call=call)
        return scope, token_ids

    async def EvictAll(  # type: ignore[override]
        self, request: messages.EvictAllRequest, context: Context
    ) -> None:
        async with self._calls.call(context) as call:
            seat, _ = await self._generation.use(request.model, call)
            await self._prompts.run(self._prompts.replies.forget_all)
            seat.prefetcher.forget()
            await self._evict(seat, ListKnown(None), messages.EvictAllResponse, context)

    async def _evict(
        self,
        seat: Seat,
        target: ListKnown,
        response: type[messages.EvictResponse] | type[messages.EvictAllResponse],
        context: Context,
    ) -> None:
        timer = self._stall_timer()
        async with timer.guard():
            async for now in seat.commands.evict(target):
                removed = now.report
                await timer.write(context, response(progress=evict_progress(now)))
            await timer.write(context, response(done=to_proto(removed, messages.EvictResult)))

    async def Verify(  # type: ignore[override]
        self, request: messages.VerifyRequest, context: Context
    ) -> None:
        timer = self._stall_timer()
        async with self._calls.call(context) as call, timer.guard():
            if request.block_limit < 0:
                refuse_value("block_limit", request.block_limit, ">= 0; 0 reads all")
            seat, _ = await self._generation.use(self._reader_of(request.model, call.caller), call)
            async for now in seat.commands.verify(ListStored(request.block_limit)):
                found = now.report
                await timer.write(context, messages.VerifyResponse(progress=verify_progress(now)))
            await timer.write(context, messages.VerifyResponse(done=verify_result(found)))

    def _reader_of(self, name: str, caller: Caller) -> str:
        """Return the loaded model whose engine checks the blocks of model `name`: itself, or any other if it
        is not loaded. Raises NotFound, and Unavailable if no model is loaded."""
        wanted = self._seats.find(name, caller).name
        ready = [each.name for each in self._seats.listed(caller) if each.state is ModelState.READY]
        if not ready:
            raise Unavailable(
                Reason.MODEL_NOT_LOADED,
                "no model is loaded, and only a loaded one can check blocks; load one, or run "
                "`icehouse cache verify` on the server's machine",
                field="model",
                metadata={"model": wanted},
            )
        return wanted if wanted in ready else ready[0]

    async def Export(  # type: ignore[override]
        self, request: messages.ExportRequest, context: Context
    ) -> None:
        timer = self._stall_timer()
        async with self._calls.call(context) as call, timer.guard():
            scope = scope_of(request, call)
            seat, _ = await self._generation.use(request.model, call)
            keys = None
            if request.HasField("prompt"):
                keys, _ = await self._generation.read_prompt(request, tenant=scope.tenant, call=call)
            await self._transfer.export(keys, scope, seat=seat, context=context, timer=timer)

    async def Import(
        self, request: AsyncIterator[messages.ImportRequest], context: Context
    ) -> messages.ImportResponse:
        async with self._calls.call(context) as call:
            first = await self._transfer.next_of(request)
            if first is None or not first.HasField("target"):
                raise InvalidRequest(
                    Reason.MESSAGE_MISSING, "the first message has no target; begin with one", field="target"
                )
            seat, _ = await self._generation.use(first.target.model, call)
            tenant = tenant_of(first.target.cache, call.caller)
            return await self._transfer.adopt(request, tenant, seat=seat)
