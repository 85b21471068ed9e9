"""A scripted engine with a thread of its own, so that every event really crosses threads."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable

from icehouse_server.domain.cache_commands import CacheAnswer, CacheCommand
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.chat import Conversation, RenderedChat
from icehouse_server.domain.events import (
    CacheReport,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    ReuseLimit,
    Started,
    Usage,
)
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import DraftCounts, GenerationRequest, SpeculationLimit
from icehouse_server.domain.stats import EngineStats
from icehouse_server.errors import Cancelled, CannotFit, IcehouseError, InvalidRequest, Overloaded, Reason
from icehouse_server.rpc.engine_client.ports import CommandReply, SplitterPort, StatsReply
from icehouse_server.rpc.engine_client.router import Router

Script = Callable[[GenerationRequest], Iterable[Event]]

MODEL_INFO = ModelInfo(
    model_id="tiny",
    architecture="llama",
    vocabulary_size=300,
    context_token_limit=64,
    dtype="float32",
    quantization="none",
    parameter_count=1000,
    weight_bytes=4000,
    kv_bytes_per_token=128,
    cache_classes=("KVCache",),
    fingerprint_hex="ab" * 32,
    has_chat_template=True,
    eos_token_ids=(299,),
    device="cpu",
)

REPORT = CacheReport(ram_token_count=2, ssd_token_count=1, restore_s=0.25, limit=ReuseLimit.DIVERGED)


class FakeTokenizer:
    """One token per byte of UTF-8."""

    def __init__(self) -> None:
        self.thread_names: set[str] = set()
        self.conversations: list[Conversation] = []

    def encode(self, text: str) -> list[int]:
        self.thread_names.add(threading.current_thread().name)
        return list(text.encode("utf-8"))

    def render_chat(self, conversation: Conversation) -> RenderedChat:
        if conversation.messages[-1].role == "assistant":
            raise InvalidRequest(Reason.CHAT_INVALID, "the template wants the user last", field="chat")
        self.conversations.append(conversation)
        turns = "".join(f"{m.role}:{m.content};" for m in conversation.messages)
        return RenderedChat(tuple(self.encode(turns)))

    def reply_splitter(
        self, conversation: Conversation, rendered: RenderedChat, *, make_call_id: Callable[[int], str]
    ) -> SplitterPort | None:
        return None

    def hides_markers(self, conversation: Conversation) -> bool:
        return bool(conversation.tools)

    def spell(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token_id: int) -> str:
        return f"<{token_id}>"


def usage_of(request: GenerationRequest, *, output_token_count: int) -> Usage:
    """Return a usage whose every number differs, so that a mix-up shows."""
    return Usage(
        prompt_token_count=len(request.prompt_token_ids),
        output_token_count=output_token_count,
        cache=REPORT,
        queue_s=0.5,
        prefill_s=1.5,
        decode_s=2.5,
        ttft_s=3.5,
        total_s=4.5,
        drafts=DraftCounts(8, 5, SpeculationLimit.SAMPLING),
    )


def started(request: GenerationRequest) -> Started:
    """Return the first event of a request."""
    return Started(prompt_token_count=len(request.prompt_token_ids), cache=REPORT, queue_s=0.5)


def finished(request: GenerationRequest, *, output_token_count: int = 0) -> Finished:
    """Return the last event of a request that ran to its limit."""
    return Finished(FinishReason.LENGTH, None, usage_of(request, output_token_count=output_token_count))


def counting(request: GenerationRequest) -> Iterable[Event]:
    """Script: as many numbered words as were asked for."""
    yield started(request)
    for index in range(request.max_output_tokens):
        yield Delta(f" w{index}", (index,))
    yield finished(request, output_token_count=request.max_output_tokens)


def hanging(request: GenerationRequest) -> Iterable[Event]:
    """Script: start, say one word, and wait for a cancel."""
    yield started(request)
    yield Delta("hello", (1,))


class FakeEngine:
    """Implements EnginePort. Events of `script` are published from the engine's thread."""

    def __init__(self, router: Router, *, script: Script = counting) -> None:
        self.router = router
        self.script = script
        self.refusal: IcehouseError | None = None
        self.heartbeat_time = 0.0
        self.step_allowance_s = 0.0
        self.stats = EngineStats(step_total=7)
        self.cache_stats: CacheStats | None = None
        self.order_answer: CacheAnswer | IcehouseError = CannotFit(Reason.CACHE_UNSUPPORTED, "no cache here")
        self.orders: list[CacheCommand] = []
        self.answers_stats = True
        self.submitted: list[GenerationRequest] = []
        self.cancelled: queue.SimpleQueue[RequestId] = queue.SimpleQueue()
        self._open: set[RequestId] = set()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake inference", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, siblings: tuple[GenerationRequest, ...] = ()) -> None:
        if self.refusal is not None:
            raise self.refusal
        for each in (request, *siblings):
            self.submitted.append(each)
            self._work.put(functools.partial(self._play, each))

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.put(request_id)
        self._work.put(lambda: self._end(request_id))

    def request_stats(self, reply: StatsReply) -> None:
        if self.answers_stats:
            self._work.put(lambda: reply(self.stats, self.cache_stats))

    def submit_command(self, order: CacheCommand, reply: CommandReply) -> None:
        self.orders.append(order)
        self._work.put(lambda: reply(self.order_answer))

    def publish(self, request: GenerationRequest, *events: Event) -> None:
        """Publish events of a running request from the engine's thread, in one hand-over."""
        self._work.put(lambda: self.router.publish([(request.request_id, event) for event in events]))

    def call_on_thread(self, work: Callable[[], object]) -> None:
        """Call `work` on the engine's thread after all that it was given before."""
        self._work.put(work)

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _play(self, request: GenerationRequest) -> None:
        self._open.add(request.request_id)
        for event in self.script(request):
            self.router.publish([(request.request_id, event)])
            if isinstance(event, Finished):
                self._open.discard(request.request_id)

    def _end(self, request_id: RequestId) -> None:
        if request_id in self._open:
            self._open.discard(request_id)
            error = Cancelled(Reason.CANCELLED, "cancelled")
            self.router.publish([(request_id, Failed(error))])


def overloaded() -> Overloaded:
    """Return a refusal as the engine makes it."""
    return Overloaded(
        Reason.QUEUE_FULL, "8 requests wait, limit 8", retry_after_s=1.5, metadata={"waiting_limit": 8}
    )
