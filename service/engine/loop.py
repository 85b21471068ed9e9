"""The engine's step: drain the mailbox, plan, run, publish (inference thread).

Everything here is plain code on one thread: no locks, no waiting but in the mailbox. With a
fake runner and a fake clock the same loop runs in tests, one `step` at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from service.clock import Clock
from service.domain.events import Delta, Event, Failed, Finished, FinishReason, PrefillProgress, Started
from service.domain.ids import RequestId
from service.domain.model import ModelInfo
from service.domain.request import GenerationRequest
from service.domain.stats import EngineStats
from service.engine.counters import Counters
from service.engine.ids import SequenceId
from service.engine.mailbox import Mailbox
from service.engine.messages import Cancel, Message, Order, QueryStats, Submit
from service.engine.ports import Drawn, Listener, Runner
from service.engine.scheduler import DecodeStep, Idle, PrefillChunk, Scheduler
from service.engine.sequence import Sequence
from service.engine.text import TextStream
from service.errors import Cancelled, DeadlineExceeded, IcehouseError, Overloaded, Reason, Unavailable

_IDLE_WAIT_S = 0.5
"""How long an idle engine sleeps at most, so that its heartbeat stays fresh."""


class EngineLoop:
    """One engine's running state. Made, stepped and dropped on the inference thread."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        mailbox: Mailbox[Message],
        listener: Listener,
        clock: Clock,
        decode: Callable[[list[int]], str],
        model: ModelInfo,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._mailbox = mailbox
        self._listener = listener
        self._clock = clock
        self._decode = decode
        self._model = model
        self._eos = frozenset(model.eos_token_ids)
        self._sequences: dict[RequestId, Sequence] = {}
        self._by_id: dict[SequenceId, Sequence] = {}
        self._next_id = 0
        self._start_time = clock.monotonic()
        self._counters = Counters()
        self._events: list[tuple[RequestId, Event]] = []
        self._drain_deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._drain_deadline is not None

    @property
    def is_done(self) -> bool:
        """Drained: nothing runs and nothing new is let in."""
        return self.is_draining and not self._sequences

    def step(self) -> None:
        """Do one unit of work, or wait a moment for a message when there is none."""
        wait_s = _IDLE_WAIT_S if self._scheduler.is_empty else 0.0
        for message in self._mailbox.take_all(timeout_s=wait_s):
            self._receive(message)
        self._expire()
        self._admit()
        work = self._scheduler.next_work()
        if isinstance(work, PrefillChunk):
            self._prefill(work)
        elif isinstance(work, DecodeStep):
            self._decode_step()
        else:
            assert isinstance(work, Idle), work
        self._publish()

    def fail_all(self, error: IcehouseError) -> None:
        """End every request with `error`; what the mailbox still holds too."""
        for message in self._mailbox.close():
            if isinstance(message, Submit):
                self._events.append((message.request.request_id, Failed(error)))
            elif isinstance(message, QueryStats):
                message.reply(self._stats(), None)
            elif isinstance(message, Order):
                message.reply(error)
        self._events += [(request_id, Failed(error)) for request_id in self._sequences]
        self._sequences.clear()
        self._by_id.clear()
        self._publish()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._accept(message.request)
        elif isinstance(message, Cancel):
            sequence = self._sequences.get(message.request_id)
            if sequence is not None:
                self._counters.cancelled_total += 1
                self._end(sequence, Failed(message.error))
        elif isinstance(message, QueryStats):
            message.reply(self._stats(), None)
        elif isinstance(message, Order):
            message.reply(IcehouseError(Reason.CACHE_UNSUPPORTED, "this server keeps no prefix cache"))
        else:
            self._drain_deadline = message.deadline_time

    def _accept(self, request: GenerationRequest) -> None:
        if self.is_draining:
            self._refuse(request, Unavailable(Reason.DRAINING, "the server is shutting down"))
            return
        room = self._model.context_token_limit - len(request.prompt_token_ids)
        sequence = Sequence(
            sequence_id=SequenceId(self._next_id),
            request=request,
            text=TextStream(
                decode=lambda ids: self._decode(list(ids)),
                prompt_token_ids=request.prompt_token_ids,
                stops=request.stop,
            ),
            output_token_limit=min(request.max_output_tokens, room),
        )
        if not self._scheduler.enqueue(sequence):
            limit = self._scheduler.limits.waiting_limit
            self._refuse(
                request,
                Overloaded(
                    Reason.QUEUE_FULL,
                    f"{limit} requests wait already, which is the limit; try again later",
                    retry_after_s=1.0,
                    metadata={"waiting_count": limit, "waiting_limit": limit},
                ),
            )
            return
        self._next_id += 1
        self._counters.accepted_total += 1
        self._counters.prompt_token_total += len(request.prompt_token_ids)
        self._sequences[request.request_id] = sequence
        self._by_id[sequence.sequence_id] = sequence

    def _refuse(self, request: GenerationRequest, error: IcehouseError) -> None:
        self._counters.rejected_total += 1
        self._events.append((request.request_id, Failed(error)))

    def _expire(self) -> None:
        """End what is past its deadline, and everything once the drain's own deadline has passed."""
        now = self._clock.monotonic()
        drained = self._drain_deadline is not None and now >= self._drain_deadline
        for sequence in list(self._sequences.values()):
            deadline = sequence.request.deadline_time
            if deadline is not None and now >= deadline:
                waited = now - sequence.request.arrival_time
                self._counters.cancelled_total += 1
                self._end(
                    sequence,
                    Failed(
                        DeadlineExceeded(
                            Reason.DEADLINE_EXCEEDED,
                            f"the deadline passed after {waited:.3f} s in phase {sequence.phase.name}",
                            metadata={"waited_s": f"{waited:.3f}", "phase": sequence.phase.name},
                        )
                    ),
                )
            elif drained:
                self._counters.cancelled_total += 1
                self._end(
                    sequence,
                    Failed(Unavailable(Reason.DRAINING, "the server stopped before this request was done")),
                )

    def _admit(self) -> None:
        now = self._clock.monotonic()
        for sequence in self._scheduler.admit():
            sequence.admitted_time = now
            self._runner.open(sequence.sequence_id)
            self._tell(
                sequence,
                Started(
                    prompt_token_count=len(sequence.request.prompt_token_ids),
                    cache=sequence.cache,
                    queue_s=now - sequence.request.arrival_time,
                ),
            )
            self._join_if_prefilled(sequence)

    def _prefill(self, chunk: PrefillChunk) -> None:
        sequence = chunk.sequence
        tokens = sequence.request.prompt_token_ids
        began = self._clock.monotonic()
        self._runner.prefill(sequence.sequence_id, tokens[chunk.start : chunk.stop])
        elapsed_s = self._clock.monotonic() - began
        self._scheduler.note_prefill(elapsed_s)
        self._counters.note_prefill(chunk.stop - chunk.start, elapsed_s)
        sequence.processed_token_count = chunk.stop
        self._tell(sequence, PrefillProgress(chunk.stop, len(tokens)))
        self._join_if_prefilled(sequence)

    def _join_if_prefilled(self, sequence: Sequence) -> None:
        if not sequence.is_prefilled:
            return
        if sequence.output_token_limit == 0:
            asked_for_more = sequence.request.max_output_tokens > 0
            reason = FinishReason.CONTEXT_LENGTH if asked_for_more else FinishReason.LENGTH
            self._finish(sequence, reason, self._clock.monotonic())
            return
        self._runner.join(
            sequence.sequence_id,
            last_token_id=sequence.request.prompt_token_ids[-1],
            sampling=sequence.request.sampling,
        )
        self._scheduler.start_decoding(sequence)

    def _decode_step(self) -> None:
        began = self._clock.monotonic()
        drawn = self._runner.decode()
        elapsed_s = self._clock.monotonic() - began
        self._scheduler.note_decode(elapsed_s)
        self._counters.note_decode(len(drawn), elapsed_s)
        now = self._clock.monotonic()
        for token in drawn:
            self._take_token(token, now)

    def _take_token(self, drawn: Drawn, now: float) -> None:
        sequence = self._by_id[drawn.sequence_id]
        if sequence.first_token_time is None:
            sequence.first_token_time = now
        sequence.output_token_ids.append(drawn.token_id)
        sequence.undelivered_token_ids.append(drawn.token_id)
        if drawn.token_id in self._eos:
            self._finish(sequence, FinishReason.STOP_TOKEN, now)
            return
        step = sequence.text.push(drawn.token_id)
        self._deliver(sequence, step.text)
        if step.stop_string is not None:
            self._finish(sequence, FinishReason.STOP_STRING, now, stop_string=step.stop_string)
        elif len(sequence.output_token_ids) >= sequence.output_token_limit:
            asked_for_more = sequence.output_token_limit < sequence.request.max_output_tokens
            reason = FinishReason.CONTEXT_LENGTH if asked_for_more else FinishReason.LENGTH
            self._finish(sequence, reason, now)

    def _deliver(self, sequence: Sequence, text: str, *, always: bool = False) -> None:
        if text or (always and sequence.undelivered_token_ids):
            self._tell(sequence, Delta(text, tuple(sequence.undelivered_token_ids)))
            sequence.undelivered_token_ids.clear()

    def _finish(
        self, sequence: Sequence, reason: FinishReason, now: float, *, stop_string: str | None = None
    ) -> None:
        if stop_string is None:
            last = sequence.text.finish()
            if last.stop_string is not None:
                reason, stop_string = FinishReason.STOP_STRING, last.stop_string
            self._deliver(sequence, last.text, always=True)
        else:
            self._deliver(sequence, "", always=True)
        self._counters.finished_total += 1
        self._end(sequence, Finished(reason, stop_string, sequence.usage(now)))

    def _end(self, sequence: Sequence, event: Finished | Failed) -> None:
        self._scheduler.remove(sequence)
        self._runner.release([sequence.sequence_id])
        del self._sequences[sequence.request.request_id]
        del self._by_id[sequence.sequence_id]
        self._tell(sequence, event)

    def _tell(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.request.request_id, event))

    def _publish(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._listener.publish(events)

    def _stats(self) -> EngineStats:
        memory = self._runner.memory()
        limits = self._scheduler.limits
        counters = self._counters
        return EngineStats(
            uptime_s=self._clock.monotonic() - self._start_time,
            mailbox_count=len(self._mailbox),
            mailbox_limit=self._mailbox.limit,
            waiting_count=self._scheduler.waiting_count,
            waiting_limit=limits.waiting_limit,
            prefilling_count=self._scheduler.prefilling_count,
            decoding_count=self._scheduler.decoding_count,
            decoding_limit=limits.running_limit,
            step_total=counters.step_total,
            decode_step_p50_s=counters.decode_step_quantile_s(0.5),
            decode_step_p99_s=counters.decode_step_quantile_s(0.99),
            prefill_tokens_per_s=counters.prefill_tokens_per_s,
            accepted_total=counters.accepted_total,
            rejected_total=counters.rejected_total,
            finished_total=counters.finished_total,
            cancelled_total=counters.cancelled_total,
            failed_total=counters.failed_total,
            prompt_token_total=counters.prompt_token_total,
            cached_token_total=counters.cached_token_total,
            prefilled_token_total=counters.prefilled_token_total,
            output_token_total=counters.output_token_total,
            active_memory_bytes=memory.active_bytes,
            peak_memory_bytes=memory.peak_bytes,
            memory_limit_bytes=memory.limit_bytes,
        )


def cancelled_by_client() -> Cancelled:
    """The error a caller that went away would be told."""
    return Cancelled(Reason.CANCELLED, "the client cancelled the call or went away")
