"""Generation: one request from the wire to its last event; read, submitted, told, never left running."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from icehouse.v1 import cache_policy_pb2, tool_pb2

from icehouse_server.clock import Clock
from icehouse_server.config import ServerConfig
from icehouse_server.domain.events import Event, Failed
from icehouse_server.domain.ids import AdapterName, RequestId, Tenant
from icehouse_server.domain.request import CacheUse, GenerationRequest, LogprobsWanted, Speculation
from icehouse_server.domain.response_format import ResponseFormat
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.rpc.access.tenants import Stay, Tenants
from icehouse_server.rpc.calls.calls import Call
from icehouse_server.rpc.engine_client.outbox import Outboxes
from icehouse_server.rpc.engine_client.ports import EnginePort, ServedModel
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.messages.sampling import check_bad_words, spellings
from icehouse_server.rpc.messages.validation import (
    cache_use_of,
    check_adapter,
    check_model,
    priority_of,
    refuse_value,
    request_id_of,
    shared_tenant_of,
    tenant_of,
)
from icehouse_server.rpc.services.grammars import GrammarCompilers
from icehouse_server.rpc.services.prepared import Prepared
from icehouse_server.rpc.services.prompts import PromptMessage, PromptReader, ReadPrompt, prompt_of


class RunMessage(PromptMessage, Protocol):
    """A request message that makes the engine run."""

    @property
    def request_id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    @property
    def cache(self) -> cache_policy_pb2.CachePolicy: ...
    @property
    def priority(self) -> int: ...


class Generation:
    """Runs requests for the services. Owned by the event loop."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        engine: EnginePort,
        router: Router,
        prompts: PromptReader,
        grammars: GrammarCompilers,
        tenants: Tenants,
        draw_seed: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._config = config
        self._engine = engine
        self._router = router
        self._prompts = prompts
        self._grammars = grammars
        self._tenants = tenants
        self._draw_seed = draw_seed

    def draw_seed(self) -> int:
        """Return a seed for a request that names none, 0 to 2**64 - 1."""
        return self._draw_seed()

    async def prepare(
        self,
        message: RunMessage,
        kind: str | None,
        *,
        call: Call,
        max_output_tokens: int,
        sampling: SamplingParams,
        bad_words: Sequence[str] = (),
        stop: tuple[str, ...] = (),
        tool_choice: tool_pb2.ToolChoice | None = None,
        form: ResponseFormat | None = None,
        logprobs: LogprobsWanted | None = None,
        speculation: Speculation | None = None,
        completion_count: int = 1,
    ) -> Prepared:
        """Return the served model and the engine's request; raises what refuses it.

        `kind` is the prompt's set field. What needs no tokenizer is refused first: it costs nothing.
        """
        request_id = request_id_of(message.request_id, generated=call.request_id)
        call.request_id = request_id
        cache_use = cache_use_of(message.cache)
        if max_output_tokens == 0 and cache_use in (CacheUse.READ_ONLY, CacheUse.OFF):
            refuse_value("cache.use", cache_use.name, "one that writes, for a warm-up")
        tenant = call.tenant = tenant_of(message.cache, call.caller)
        shared_tenant = self.shared_tenant_of(message.cache, call)
        priority = priority_of(message.priority)
        check_bad_words(bad_words)
        model, prompt = await self.read_prompt(
            message, kind, model_id=message.model, adapter=message.adapter, call=call, tool_choice=tool_choice
        )
        if bad_words:
            banned = await self._prompts.run(lambda: spellings(bad_words, model.tokenizer))
            sampling = dataclasses.replace(sampling, banned=(*sampling.banned, *banned))
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            max_output_tokens=max_output_tokens,
            sampling=sampling,
            stop=stop,
            arrival_time=call.arrival_time,
            deadline_time=call.deadline_time,
            cache_use=cache_use,
            tenant=tenant,
            adapter=AdapterName(message.adapter),
            shared_tenant=shared_tenant,
            priority=priority,
            grammar=await self._grammars.compile(form) if form is not None else None,
            logprobs=logprobs,
            speculation=speculation,
            shows_markers=prompt.chat is not None and model.tokenizer.hides_markers(prompt.chat.conversation),
        )
        return Prepared(model, request, prompt.chat, completion_count)

    def shared_tenant_of(self, policy: cache_policy_pb2.CachePolicy, call: Call) -> Tenant | None:
        """Return the tenant whose prompts the call may start from too; raises what refuses it."""
        return shared_tenant_of(policy, call.caller, self._tenants.limits.shared_prefix_grants)

    async def read_prompt(
        self,
        message: PromptMessage,
        kind: str | None,
        *,
        model_id: str,
        adapter: str,
        call: Call,
        tool_choice: tool_pb2.ToolChoice | None = None,
    ) -> tuple[ServedModel, ReadPrompt]:
        """Return the served model and the prompt's tokens; raises what refuses them."""
        model = self._router.require_model()
        check_model(model_id, model.info)
        check_adapter(adapter, model.info)
        call.model_id = model.info.model_id
        began = self._clock.monotonic()
        prompt = await self._prompts.read(prompt_of(message, kind, model.info, tool_choice), model)
        call.tokenize_s = self._clock.monotonic() - began
        call.prompt_token_count = len(prompt.token_ids)
        return model, prompt

    @contextlib.asynccontextmanager
    async def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        call: Call,
        on_stall: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[AsyncIterator[tuple[int, Event]]]:
        """Submit requests for one prompt together and give their events, with which of them it is of;
        leaving the block early cancels them all at once.

        The iterator ends after each one's `Finished` and raises the error of the first `Failed`.
        """

        def stalled(index: int) -> None:
            # The others are cancelled on the way out: their ends must not be heard before the reason.
            self._engine.cancel(requests[index].request_id)
            on_stall()

        outboxes = Outboxes(
            count=len(requests),
            event_limit=self._config.outbox_event_limit,
            byte_limit=self._config.outbox_byte_limit,
            on_stall=stalled,
        )
        self._router.require_model()
        with self._tenants.staying(requests) as stays, self._submitted(requests, outboxes):
            yield _events(outboxes, stays, call)

    @contextlib.contextmanager
    def _submitted(self, requests: Sequence[GenerationRequest], outboxes: Outboxes) -> Iterator[None]:
        """Have the engine work on the requests until the block ends."""
        opened: list[RequestId] = []
        try:
            for request, outbox in zip(requests, outboxes.all, strict=True):
                self._router.open(request.request_id, outbox)
                opened.append(request.request_id)
            self._engine.submit(requests[0], tuple(requests[1:]))
        except BaseException:
            for request_id in opened:
                self._router.forget(request_id)
            raise
        try:
            yield
        finally:
            for request_id, outbox in zip(opened, outboxes.all, strict=True):
                self._router.release(request_id)
                if not outbox.ended:
                    self._engine.cancel(request_id)


async def _events(outboxes: Outboxes, stays: Sequence[Stay], call: Call) -> AsyncIterator[tuple[int, Event]]:
    while not outboxes.ended:
        index, event = await outboxes.take()
        call.note(event)
        if isinstance(event, Failed):
            raise event.error
        stays[index].note(event)
        yield index, event
