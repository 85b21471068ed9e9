"""Generation: a request from the wire to its last event, and what all services share."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

from icehouse.v1 import cache_policy_pb2, inference_service_pb2, model_service_pb2, prompt_pb2, tool_pb2

from icehouse_server.clock import Clock
from icehouse_server.config import ServerConfig
from icehouse_server.domain.blocks import TokenKeys
from icehouse_server.domain.chat import ChatMessage
from icehouse_server.domain.events import Event, Failed
from icehouse_server.domain.ids import AdapterName, RequestId, Tenant
from icehouse_server.domain.model import ModelKind, ModelState
from icehouse_server.domain.request import CacheUse, GenerationRequest, part_of
from icehouse_server.domain.response_format import Grammar, JsonObject, JsonSchema, ResponseFormat
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.errors import Cancelled, InvalidRequest, Reason
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.tenants import TenantRequest, Tenants
from icehouse_server.rpc.calls.call_lifecycle import RpcCall, RpcCalls
from icehouse_server.rpc.engine_client.answers import StallTimer
from icehouse_server.rpc.engine_client.engine_ports import ServedModel
from icehouse_server.rpc.engine_client.grammars import GrammarCompilers
from icehouse_server.rpc.engine_client.open_requests import OpenRequest, OpenRequests, ended_by_request
from icehouse_server.rpc.engine_client.outbox import Outboxes
from icehouse_server.rpc.engine_client.prefetcher import NextTurn, conversation_of
from icehouse_server.rpc.engine_client.seat import Seat, Seats
from icehouse_server.rpc.messages.field_checks import (
    PromptMessage,
    RunMessage,
    adapter_of,
    cache_use_of,
    check_adapter,
    check_adapter_of,
    check_kind,
    check_name,
    policy_of,
    priority_of,
    refuse_value,
    shared_tenant_of,
    tenant_of,
)
from icehouse_server.rpc.messages.options import spellings
from icehouse_server.rpc.messages.proto_map import duration_proto, enum_proto
from icehouse_server.rpc.messages.responses import ReportNotes
from icehouse_server.rpc.services.observation import CallObservation
from icehouse_server.rpc.services.prepared import KnownReplies, Prepared, RenderedConversation
from icehouse_server.rpc.services.prompts import (
    PromptReader,
    PromptRules,
    ReadPrompt,
    UncheckedPrompt,
    prompt_of,
)
from icehouse_server.structured_output.reasoning_budget import FormScope, ReasoningBudget
from icehouse_server.text.call_form import loosened
from icehouse_server.text.chat.next_turn import opening_of
from icehouse_server.text.reasoning import ReplyReasoning
from icehouse_server.text.reply_memory import ReplyScope

_TELL_S = 1.0
"""How often a caller is told that its model is being loaded."""


class Generation:
    """Runs requests for the services. Owned by the event loop."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        seats: Seats,
        prompts: PromptReader,
        tenants: Tenants,
        clock: Clock,
    ) -> None:
        self.open_requests = OpenRequests(seats)
        """The running and waiting requests of all services."""
        self._clock = clock
        self._config = config
        self._seats = seats
        self._prompts = prompts
        self._tenants = tenants

    async def use(self, name: str, call: RpcCall) -> tuple[Seat, ServedModel]:
        """Return the model that a call names and its seat, which the call holds until it ends; raises what
        refuses the name, and why the model cannot be loaded."""
        if call.used is None:
            call.used = await self._seats.use(name, call)
        return call.used, call.used.router.require_model()

    async def use_for(self, message: RunMessage, call: RpcCall) -> ServedModel:
        """Return the model of a request that makes the engine run; raises as `use` does.

        The call gets the request's name here, so that it can be found by it while the model loads, and if
        loading fails.
        """
        if message.request_id:
            call.request_id = check_name("request_id", message.request_id)
        if isinstance(message, inference_service_pb2.GenerateRequest):
            if message.session_id:
                call.session_id = check_name("session_id", message.session_id)
            if message.parent_session_id:
                call.parent_session_id = check_name("parent_session_id", message.parent_session_id)
        if call.used is None and self._seats.are_several:
            model_name = self._seats.find(message.model, call.caller).name
            async with self.open_requests.loading(call.method, _named(message, call), model_name):
                await self.use(message.model, call)
        _, model = await self.use(message.model, call)
        return model

    async def telling(
        self,
        work: Coroutine[None, None, object],
        name: str,
        call: RpcCall,
        tell: Callable[[model_service_pb2.LoadingModel], Awaitable[None]],
    ) -> None:
        """Do work that takes a while for a model, and report its state about once a second."""
        using = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((using,), timeout=_TELL_S))[0]:
                model = self._seats.find(name, call.caller)
                if model.state is ModelState.READY:
                    continue  # it has just become ready, and the call continues
                elapsed = duration_proto(self._clock.monotonic() - call.arrival_time)
                state = enum_proto(model.state, model_service_pb2.ModelState)
                await tell(model_service_pb2.LoadingModel(model=model.name, state=state, elapsed=elapsed))
            await using
        finally:
            using.cancel()

    def request_of(
        self,
        message: RunMessage,
        *,
        model: ServedModel,
        call: RpcCall,
        wanted: ModelKind = ModelKind.CHAT,
    ) -> GenerationRequest:
        """Return a request without prompt and output; sets the call's model and tenant.

        This covers what all messages that run the engine have in common. Raises what refuses it, also if the
        model is not of the `wanted` kind; needs no tokenizer.
        """
        check_kind(model.info, wanted)
        check_adapter_of(message, model.info)
        call.model_id = model.info.model_id
        policy = policy_of(message)
        call.tenant = (named := _named(message, call)).tenant
        return dataclasses.replace(
            named,
            cache_use=cache_use_of(policy),
            shared_tenant=self.shared_tenant_of(policy, call),
            priority=priority_of(message.priority),
        )

    def shared_tenant_of(self, policy: cache_policy_pb2.CachePolicy, call: RpcCall) -> Tenant | None:
        """Return the other tenant whose prompts the call may reuse; raises what refuses it."""
        return shared_tenant_of(policy, call.caller, self._tenants.limits.shared_prefix_grants)

    def unchecked(
        self,
        prompt: prompt_pb2.Prompt,
        model: ServedModel,
        choice: tool_pb2.ToolChoice | None = None,
        *,
        tenant: Tenant,
        form: ResponseFormat | None = None,
    ) -> UncheckedPrompt:
        """Return a tenant's prompt unchecked, with the form of its answer."""
        rules = self.rules_of(tenant, prompt.adapter, model)
        in_json = isinstance(form, JsonSchema | JsonObject)
        check = functools.partial(prompt_of, prompt, model.info, choice, rules=rules, answers_in_json=in_json)
        return UncheckedPrompt(check, prompt.ByteSize())

    def rules_of(self, tenant: Tenant, adapter: str, model: ServedModel) -> PromptRules:
        """Return how a tenant's prompts are made stable."""
        scope = ReplyScope(model.info.fingerprint_hex, tenant, AdapterName(adapter))
        return PromptRules(
            KnownReplies(self._prompts.replies, scope), is_stable=self._tenants.limits.normalizes(tenant)
        )

    async def prepare(
        self,
        request: GenerationRequest,
        unread: UncheckedPrompt,
        model: ServedModel,
        call: RpcCall,
        *,
        bad_words: Sequence[str] = (),
        form: ResponseFormat | None = None,
        max_reasoning_tokens: int | None = None,
        completion_count: int = 1,
    ) -> Prepared:
        """Return the request for the engine, after all work of the tokenizer; raises what refuses it.

        `request` comes without prompt, banned words and grammar.
        """
        prompt = await self._read(unread, model, call)
        sampling = request.sampling
        if bad_words:
            size = model.info.vocabulary_size
            spelled = functools.partial(spellings, bad_words, model.tokenizer, vocabulary_size=size)
            banned = await self._prompts.run(spelled)
            sampling = dataclasses.replace(sampling, banned=(*sampling.banned, *banned))
        if prompt.stop_token_ids:
            stops = dict.fromkeys((*sampling.stop_token_ids, *prompt.stop_token_ids))
            sampling = dataclasses.replace(sampling, stop_token_ids=tuple(stops))
        if prompt.chat is not None and prompt.chat.conversation.tool_choice.is_forced:
            form = None  # there is no answer, only a call
        reasoning = _reasoning_of(prompt, model, limit=max_reasoning_tokens)
        grammar = await _grammar(call.seat.grammars, form, prompt.chat)
        if reasoning is not None and (
            max_reasoning_tokens is not None or (form is not None and reasoning.is_open)
        ):
            grammar = ReasoningBudget(
                reasoning=reasoning,
                token_limit=max_reasoning_tokens,
                form=grammar,
                scope=FormScope.WHOLE if form is None else FormScope.ANSWER,
                decode=model.tokenizer.decode_with_markers,
                prompt_token_ids=prompt.token_ids,
                end_token_ids=model.info.eos_token_ids,
                vocabulary_size=model.info.vocabulary_size,
            )
        request = dataclasses.replace(
            request,
            prompt_token_ids=prompt.token_ids,
            images=prompt.images,
            border_token_indices=() if prompt.chat is None else prompt.chat.rendered.border_token_indices,
            opening=0 if prompt.chat is None else opening_of(prompt.chat.conversation),
            sampling=sampling,
            grammar=grammar,
            reasoning=reasoning,
            shows_markers=prompt.chat is not None and model.tokenizer.hides_markers(prompt.chat.conversation),
        )
        notes = notes_of(prompt, model, tenant=request.tenant, call=call)
        on_end = None
        if prompt.chat is not None and completion_count == 1 and self._computes_ahead(request, prompt.chat):
            on_end = functools.partial(self._note_turn, call.seat, request, prompt.chat, model)
        return Prepared(
            model, request, prompt.chat, call.start_time, completion_count, notes, on_end, call.load_s
        )

    def _computes_ahead(self, request: GenerationRequest, chat: RenderedConversation) -> bool:
        """Whether the next turn may begin differently from this prompt and its reply.

        Stable prompts continue from the reply's tokens, unless that was not possible for this one.
        """
        if not self._config.prefetch_token_limit or not request.session_id or request.ends_session:
            return False
        if request.cache_use is not CacheUse.READ_WRITE or request.max_output_tokens == 0 or request.images:
            return False
        is_known = chat.place is not None and chat.place.known is not None
        return chat.replies is None or (is_known and not chat.rendered.kept_token_count)

    def _note_turn(
        self,
        seat: Seat,
        request: GenerationRequest,
        chat: RenderedConversation,
        model: ServedModel,
        reply: ChatMessage,
        _: int | None,
    ) -> None:
        known = array.array("i", (*request.prompt_token_ids, *reply.token_ids))
        make = functools.partial(self._next_turn, request, chat, model, reply, known)
        seat.prefetcher.note(NextTurn(conversation_of(request), len(known), make))

    async def _next_turn(
        self,
        request: GenerationRequest,
        chat: RenderedConversation,
        model: ServedModel,
        reply: ChatMessage,
        known: array.array[int],
        request_id: RequestId,
    ) -> GenerationRequest | None:
        """Return a warm-up of the beginning of the next turn, if enough of it is not `known`."""
        token_ids = await self._prompts.next_beginning(
            chat, reply, model, known=known, token_limit=self._config.prefetch_token_limit
        )
        if not token_ids:
            return None
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_output_tokens=0,
            sampling=SamplingParams(),
            stop=(),
            arrival_time=self._clock.monotonic(),
            tenant=request.tenant,
            adapter=request.adapter,
            shared_tenant=request.shared_tenant,
            session_id=request.session_id,
            parent_session_id=request.parent_session_id,
            is_prefetch=True,
        )

    async def read_prompt(
        self, message: PromptMessage, *, tenant: Tenant, call: RpcCall
    ) -> tuple[TokenKeys, ReportNotes]:
        """Return the token keys of a prompt that the engine does not run, and notes for its cache report;
        raises what refuses it."""
        _, model = await self.use(message.model, call)
        check_adapter(message.prompt.adapter, model.info, field="prompt.adapter")
        call.model_id = model.info.model_id
        self.charge(0, call=call)
        read = await self._read(self.unchecked(message.prompt, model, tenant=tenant), model, call)
        self.charge(len(read.token_ids), call=call)
        return read.keys, notes_of(read, model, tenant=tenant, call=call)

    def charge(self, token_count: int, *, call: RpcCall) -> None:
        """Charge the tokens of a call that runs no request; raises Overloaded as for a request."""
        self._tenants.charge(call.caller.tenant or Tenant(""), token_count)

    async def _read(self, prompt: UncheckedPrompt, model: ServedModel, call: RpcCall) -> ReadPrompt:
        began = self._clock.monotonic()
        read = await self._prompts.read(prompt, model)
        call.tokenize_s = self._clock.monotonic() - began
        call.prompt_token_count = len(read.token_ids)
        if read.images:
            # Until the call ends: a parked request reads its images again.
            size_bytes = sum(span.image.size_bytes for span in read.images)
            call.holds.enter_context(self._prompts.image_memory.hold(callers.origin.get(), size_bytes))
        return read

    @contextlib.asynccontextmanager
    async def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        call: RpcCall,
        on_stall: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[AsyncIterator[tuple[int, Event]]]:
        """Submit the requests of one prompt together and yield their events, each with its request's index.
        Leaving the block early cancels all of them.

        The iterator ends after each request's `Finished` and raises the error of the first `Failed`.
        """
        seat = call.seat

        def stalled(index: int) -> None:
            # Leaving the block cancels the others: their ends must not be reported before the reason.
            seat.engine.cancel(requests[index].request_id)
            on_stall()

        outboxes = Outboxes(
            count=len(requests),
            event_limit=self._config.outbox_event_limit,
            byte_limit=self._config.outbox_byte_limit,
            on_stall=stalled,
        )
        seat.router.require_model()
        with (
            self._tenants.staying(requests) as stays,
            self.open_requests.opened(seat, call.method, requests, outboxes.all) as opened,
        ):
            yield _events(outboxes, stays, opened, call)

    @contextlib.asynccontextmanager
    async def run_each(
        self, whole: GenerationRequest, prompts: Sequence[tuple[int, ...]], *, call: RpcCall
    ) -> AsyncIterator[AsyncIterator[tuple[int, Event]]]:
        """As `run`, with one request per prompt, otherwise like `whole`; indices are those of the prompts.

        The engine judges requests that come together by the first one, so the longest comes first.
        """
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        requests = [
            dataclasses.replace(
                whole, request_id=part_of(whole.request_id, rank), prompt_token_ids=prompts[index]
            )
            for rank, index in enumerate(order)
        ]
        async with self.run(requests, call=call) as events:
            yield ((order[rank], event) async for rank, event in events)


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceParts:
    """What the services share. `draw_seed` returns 0 to 2**64 - 1, for a request without a seed."""

    config: ServerConfig
    clock: Clock
    calls: RpcCalls
    seats: Seats
    observation: CallObservation
    prompts: PromptReader
    generation: Generation
    draw_seed: Callable[[], int]


class Service:
    """The base of every servicer.

    Streams are written with context.write, not as generators, so that a blocked write can be timed.
    """

    def __init__(self, parts: ServiceParts) -> None:
        self._config = parts.config
        self._clock = parts.clock
        self._calls = parts.calls
        self._seats = parts.seats
        self._observation = parts.observation
        self._prompts = parts.prompts
        self._generation = parts.generation
        self._draw_seed = parts.draw_seed

    def _stall_timer(self) -> StallTimer:
        return StallTimer(timeout_s=self._config.stall_timeout_s)


def _named(message: RunMessage, call: RpcCall) -> GenerationRequest:
    return call.request(tenant_of(policy_of(message), call.caller), adapter=adapter_of(message))


async def _grammar(
    grammars: GrammarCompilers, form: ResponseFormat | None, chat: RenderedConversation | None
) -> Grammar | None:
    """Return the grammar of the response format, of the tool calls, or of either."""
    call_form = None if chat is None else chat.rendered.call_form
    if chat is None or call_form is None:
        return None if form is None else await grammars.compile(form)
    if isinstance(form, JsonSchema | JsonObject) and not call_form.trigger:
        call_form = dataclasses.replace(call_form, answer=form)
    elif form is not None:
        if not chat.conversation.constrains_calls:
            return await grammars.compile(form)
        raise InvalidRequest(
            Reason.RESPONSE_FORMAT_INVALID,
            "response_format is set, and the tools constrain the output too, which works together only "
            "if the format is JSON and the model marks its calls in its text; leave one out",
            field="response_format",
        )
    for each in dict.fromkeys((call_form, loosened(call_form, chat.conversation))):
        try:
            return await grammars.compile(each, field="prompt.tools")
        except InvalidRequest as error:
            refusal = error
    if chat.conversation.constrains_calls:
        raise refusal
    # The prompt already contains the beginning of a required call.
    return None if form is None else await grammars.compile(form)


def _reasoning_of(prompt: ReadPrompt, model: ServedModel, *, limit: int | None) -> ReplyReasoning | None:
    """Return how the reply reasons, if it does; raises InvalidRequest if it must stop and cannot."""
    if prompt.chat is None:
        if limit is not None:
            refuse_value("max_reasoning_tokens", limit, "absent without `chat`")
        return None
    chat = prompt.chat
    reasoning = model.tokenizer.reply_reasoning(chat.conversation, chat.rendered)
    reasoning = None if reasoning is None else reasoning.within(model.info.vocabulary_size)
    if limit is not None and (reasoning is None or not reasoning.end_token_ids):
        raise InvalidRequest(
            Reason.UNSUPPORTED,
            f"max_reasoning_tokens is {limit}, but this model does not mark where reasoning ends; omit it",
            field="max_reasoning_tokens",
            metadata={"max_reasoning_tokens": limit},
        )
    return reasoning


def notes_of(prompt: ReadPrompt, model: ServedModel, *, tenant: Tenant, call: RpcCall) -> ReportNotes:
    """Return what a prompt's cache report says in addition to the engine's report.

    Only the tenant of both prompts sees where a prompt differs from a cached one, not an operator who acts
    for another tenant.
    """
    tokenizer = model.tokenizer

    def text(token_id: int) -> str:
        return tokenizer.decode_with_markers((token_id,)) or tokenizer.piece(token_id)

    return ReportNotes(text=text if call.caller.tenant in (None, tenant) else None, changes=prompt.changes)


async def _events(
    outboxes: Outboxes, stays: Sequence[TenantRequest], opened: OpenRequest, call: RpcCall
) -> AsyncIterator[tuple[int, Event]]:
    while not outboxes.ended:
        index, event = await outboxes.take()
        call.note(event)
        opened.note(event)
        if isinstance(event, Failed):
            if opened.is_cancelled and isinstance(event.error, Cancelled):
                raise ended_by_request()
            raise event.error
        stays[index].note(event)
        yield index, event
