"""Engine loop: drain the mailbox, plan, run, publish (inference thread).

Everything here is plain code on one thread: no locks, no waiting but in the mailbox. With a
fake runner and a fake clock the same loop runs in tests, one `step` at a time.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.clock import Clock
from icehouse_server.domain.events import Failed, PrefillProgress
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import TokenLogprobs, Vector
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.counters import Counters
from icehouse_server.engine.core.mailbox import Cancel, Command, Drain, Mailbox, Message, QueryStats, Submit
from icehouse_server.engine.core.ports import Decoder, Listener, Runner
from icehouse_server.engine.core.refusals import shutting_down, stopped_before_done
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.output import Output
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.flush import flush
from icehouse_server.engine.requests import Requests
from icehouse_server.engine.scheduling.parts import SchedulingParts
from icehouse_server.engine.scheduling.preemption import Preemption
from icehouse_server.engine.scheduling.scheduler import (
    DecodeStep,
    Idle,
    Join,
    PrefillChunk,
    RestoreSlice,
)
from icehouse_server.errors import IcehouseError

_IDLE_WAIT_S = 0.5
"""How long an idle engine sleeps at most, so that its heartbeat stays fresh."""


class EngineLoop:
    """One engine's running state. Made, stepped and dropped on the inference thread."""

    def __init__(
        self,
        *,
        runner: Runner,
        prefix: CacheController,
        scheduling: SchedulingParts,
        model: ModelInfo,
        tokenizer: Decoder,
        mailbox: Mailbox[Message],
        listener: Listener,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._prefix = prefix
        self._cache, self._commands = prefix.cache, prefix.commands
        self._scheduler, self._queue = scheduling.scheduler, scheduling.queue
        self._mailbox = mailbox
        self._clock = clock
        self._output = Output(listener=listener, eos_token_ids=frozenset(model.eos_token_ids))
        self._start_time = clock.monotonic()
        self.counters = Counters()
        self._requests = Requests(
            runner=runner,
            prefix=prefix,
            scheduling=scheduling,
            output=self._output,
            counters=self.counters,
            tokenizer=tokenizer,
            context_token_limit=model.context_token_limit,
            clock=clock,
        )
        self._preemption = Preemption(
            guard=scheduling.guard,
            runner=runner,
            scheduler=scheduling.scheduler,
            cache=self._cache,
            park=self._park,
        )
        self._drain_deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._drain_deadline is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing runs and nothing new is let in."""
        return self.is_draining and not len(self._requests)

    def step(self) -> None:
        """Do one unit of work, or wait a moment for a message when there is none."""
        wait_s = _IDLE_WAIT_S if self._scheduler.is_blocked else 0.0
        self._take_in(wait_s)
        self._expire()
        self._admit()
        work = self._scheduler.next_work()
        overrun = self._preemption.relieve(work)
        if isinstance(work, PrefillChunk) and overrun is not None:
            self._requests.fail(work.sequence, overrun)
        elif isinstance(work, PrefillChunk):
            self._prefill(work)
        elif isinstance(work, RestoreSlice):
            self._restore(work.sequence)
        elif isinstance(work, Join):
            self._join(work.sequence)
        elif isinstance(work, DecodeStep):
            self._decode_step()
        else:
            assert isinstance(work, Idle), work
        self._output.publish()

    def fail_all(self, error: IcehouseError) -> None:
        """End every request with `error`; what the mailbox still holds too."""
        for message in self._mailbox.close():
            if isinstance(message, Submit):
                for request in message.requests:
                    self._output.emit(request.request_id, Failed(error))
            elif isinstance(message, QueryStats):
                message.reply(self.stats(), self._cache.stats(None))
            elif isinstance(message, Command):
                message.reply(error)
        self._commands.fail_early(error)
        self._requests.abandon(error)
        self._output.publish()

    def flush(self, *, deadline_time: float) -> None:
        """Spill what RAM holds, until it is written or the deadline passes. Only when drained."""
        assert self.is_done
        under_way = self._cache.begin_flush()
        flush(under_way, wait=self._take_in, clock=self._clock, deadline_time=deadline_time)

    def _take_in(self, timeout_s: float) -> None:
        for message in self._mailbox.take_all(timeout_s=timeout_s):
            self._receive(message)
        self._output.publish()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Submit) and self.is_draining:
            self._requests.refuse(message.requests, shutting_down())
        elif isinstance(message, Submit):
            self._requests.receive(message.requests)
        elif isinstance(message, Cancel):
            self._requests.cancel(message.request_id, message.error)
        elif isinstance(message, QueryStats):
            self._commands.query(lambda cache: message.reply(self.stats(), cache))
        elif isinstance(message, Command):
            self._commands.submit(message)
        elif isinstance(message, Drain):
            self._drain_deadline = message.deadline_time
        else:
            for sequence in self._prefix.receive(message):
                if sequence.phase is Phase.LOADING:
                    self._scheduler.start_restoring(sequence)

    def _expire(self) -> None:
        """End what is past its deadline, and everything once the drain's own deadline has passed."""
        now = self._clock.monotonic()
        self._requests.expire(now)
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._requests.fail_all(stopped_before_done())

    def _admit(self) -> None:
        for ready in self._prefix.take_ready():
            self._begin(ready)
        while (sequence := self._scheduler.candidate(self._clock.monotonic())) is not None:
            if not self._preemption.may_start(sequence):
                error = self._preemption.hopeless(sequence)
                if error is None:
                    return
                self._requests.fail(sequence, error)
                continue
            self._scheduler.admit(sequence)
            if not sequence.park_count:
                sequence.admitted_time = self._clock.monotonic()
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Look the prompt up; load its blocks, rebuild its caches, or open empty ones."""
        phase = self._prefix.begin(sequence)
        if phase is Phase.FOLLOWING:
            self._scheduler.start_following(sequence)
        elif phase is Phase.LOADING:
            self._scheduler.start_loading(sequence)
        elif phase is Phase.RESTORING:
            self._scheduler.start_restoring(sequence)
        else:
            self._runner.open(sequence.sequence_id)
            self._start_prefilling(sequence)

    def _restore(self, sequence: Sequence) -> None:
        began = self._clock.monotonic()
        phase = self._prefix.continue_restore(sequence, beside_decode=self._scheduler.is_decoding)
        self._scheduler.note_restore(self._clock.monotonic() - began)
        if phase is Phase.LOADING:
            self._scheduler.start_loading(sequence)
        elif phase is Phase.PREFILLING:
            self._start_prefilling(sequence)
        elif phase is Phase.WAITING:
            self._begin(sequence)

    def _start_prefilling(self, sequence: Sequence) -> None:
        self._scheduler.start_prefilling(sequence)
        self._prefix.lead(sequence)
        if not sequence.has_started:
            sequence.has_started = True
            self._cache.settle(sequence.request, sequence.cache)
            self.counters.stats.cached_token_total += sequence.cache.cached_token_count
            self._requests.emit(sequence, sequence.started())
        self._end_if_nothing_is_asked(sequence)

    def _prefill(self, chunk: PrefillChunk) -> None:
        sequence = chunk.sequence
        tokens = sequence.input_token_ids
        began = self._clock.monotonic()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.measures_prompt:
            logprobs = self._measure(chunk)
        elif sequence.request.pooling is not None:
            sequence.take_pooled(self._pool(chunk))
        else:
            self._runner.prefill(
                sequence.sequence_id, tokens[chunk.start : chunk.stop], sequence.request.adapter
            )
        elapsed_s = self._clock.monotonic() - began
        self.counters.note_prefill(chunk.stop - chunk.start, elapsed_s)
        self._cache.note_prefill_rate(self.counters.stats.prefill_tokens_per_s)
        sequence.processed_token_count = chunk.stop
        self._scheduler.note_chunk(chunk, elapsed_s)
        self._prefix.capture(sequence, is_end=sequence.is_prefilled)
        # It counts against the turn, and says nothing of what a chunk costs.
        self._scheduler.note_prefill(self._clock.monotonic() - began - elapsed_s)
        # However small the chunks, a caller hears of its progress once a full one.
        is_reported = (
            sequence.is_prefilled or chunk.stop % self._scheduler.limits.prefill_chunk_token_count == 0
        )
        if logprobs or (is_reported and not sequence.park_count):
            self._requests.emit(sequence, PrefillProgress(chunk.stop, len(tokens), logprobs))
        self._end_if_nothing_is_asked(sequence)

    def _measure(self, chunk: PrefillChunk) -> tuple[TokenLogprobs, ...]:
        """Run a chunk for its KV and for what it says of the prompt; return what is new of that."""
        sequence = chunk.sequence
        assert sequence.request.logprobs is not None, "measured without being asked"
        measured = self._runner.prefill_measured(
            sequence.sequence_id,
            sequence.input_token_ids[chunk.start : chunk.stop],
            sequence.request.adapter,
            next_token_ids=sequence.input_token_ids[chunk.start + 1 : chunk.stop + 1],
            wanted=sequence.request.logprobs,
        )
        return sequence.take_prompt_logprobs(chunk.start, measured)

    def _pool(self, chunk: PrefillChunk) -> Vector:
        request = chunk.sequence.request
        assert request.pooling is not None, "pooled without being asked"
        tokens = chunk.sequence.input_token_ids[chunk.start : chunk.stop]
        return self._runner.prefill_pooled(
            chunk.sequence.sequence_id, tokens, request.adapter, pooling=request.pooling
        )

    def _end_if_nothing_is_asked(self, sequence: Sequence) -> None:
        if sequence.is_prefilled and sequence.output_token_limit == 0:
            now = self._clock.monotonic()
            self._requests.finish(sequence, self._output.finish(sequence, sequence.limit_reason, now))

    def _join(self, sequence: Sequence) -> None:
        self._runner.join(sequence.sequence_id, sequence.decode_row())
        self._scheduler.start_decoding(sequence)

    def _decode_step(self) -> None:
        began = self._clock.monotonic()
        drawn = self._runner.decode()
        now = self._clock.monotonic()
        self.counters.note_decode(len(drawn), now - began)
        for token in drawn:
            sequence = self._requests.find(token.sequence_id)
            if sequence is None:
                continue  # it ended with an earlier token of the same step
            if token.error is not None:
                self._requests.fail(sequence, token.error)
                continue
            end = self._output.take_token(sequence, token, now)
            self._prefix.capture(sequence, is_end=end is not None)
            if end is not None:
                self._requests.finish(sequence, end)
        self._preemption.watch_growth()
        self._scheduler.note_decode(self._clock.monotonic() - began)

    def _park(self, sequence: Sequence) -> None:
        """Take a sequence's place: its blocks stay in the tiers, and it goes on from them later."""
        self._prefix.forget(sequence)
        self._prefix.end(sequence)
        self._runner.release([sequence.sequence_id])
        self._scheduler.park(sequence)
        self.counters.stats.parked_total += 1

    def stats(self) -> EngineStats:
        """Return a copy of the engine's counters, completed with what is so now."""
        memory = self._runner.memory()
        return dataclasses.replace(
            self.counters.stats,
            uptime_s=self._clock.monotonic() - self._start_time,
            mailbox_count=len(self._mailbox),
            mailbox_limit=self._mailbox.limit,
            waiting_count=self._scheduler.waiting_count,
            waiting_limit=self._queue.limits.request_limit,
            loading_count=self._scheduler.loading_count,
            prefilling_count=self._scheduler.prefilling_count,
            decoding_count=self._scheduler.decoding_count,
            decoding_limit=self._scheduler.limits.running_limit,
            decode_step_p50_s=self.counters.decode_step_quantile_s(0.5),
            decode_step_p99_s=self.counters.decode_step_quantile_s(0.99),
            active_memory_bytes=memory.active_bytes,
            peak_memory_bytes=memory.peak_bytes,
            memory_limit_bytes=self._preemption.guard.limit_bytes,
        )
