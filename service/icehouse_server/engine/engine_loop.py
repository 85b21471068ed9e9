"""Engine loop: a step reads the mailbox, plans, runs one forward pass and publishes (inference thread).

One thread, no locks, and no waiting except for a burst. Tests step it with a fake runner and a fake clock.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

from icehouse_server.averages import quantile
from icehouse_server.clock import Clock
from icehouse_server.domain.events import Failed, PrefillProgress
from icehouse_server.domain.model import ModelInfo
from icehouse_server.domain.request import TokenLogprobs
from icehouse_server.domain.stats import EngineStats
from icehouse_server.engine.core.engine_counters import Counters
from icehouse_server.engine.core.mailbox import (
    BurstWait,
    Cancel,
    Command,
    DrainEngine,
    Mailbox,
    Message,
    QueryStats,
    Submit,
)
from icehouse_server.engine.core.ports import Decoder, Drawn, Listener, PassResult, Runner
from icehouse_server.engine.core.refusals import commands_waiting, shutting_down, stopped_before_done
from icehouse_server.engine.core.sequence import Phase, Sequence
from icehouse_server.engine.output import Output
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.prefix_cache.tiers.spill import flush
from icehouse_server.engine.requests import Requests
from icehouse_server.engine.scheduling.pass_plan import PassPlan, PrefillChunk
from icehouse_server.engine.scheduling.preemption import Preemption, SchedulingParts
from icehouse_server.errors import IcehouseError

_IDLE_WAIT_S = 0.5
"""How long an idle engine sleeps at most, so that its heartbeat stays fresh."""
_IDLE_BEFORE_WARM_UP_S = 10.0
"""An engine idle for this long compiles more: that takes seconds on a GPU, and a newcomer would wait."""
_COMMAND_S = 0.005
"""A step runs commands until they have taken this long, but at least one."""
_COMMAND_LIMIT = 256
"""How many commands may wait for their step. A command stays in the queue even if its caller leaves."""


class EngineLoop:
    """One engine's running state. Created, stepped and dropped on the inference thread."""

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
        self._waiting_commands: collections.deque[Command] = collections.deque()
        """At most `_COMMAND_LIMIT`."""
        self._command_s = 0.0
        self._scheduler = scheduling.scheduler
        self._mailbox = mailbox
        self._burst_wait = BurstWait(scheduling.scheduler.limits.policy.alone_limit)
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
            scheduling=scheduling,
            runner=runner,
            prefix=prefix,
            park=self._park,
            fail=self._requests.fail,
        )
        self._drain_deadline: float | None = None
        self._dispatched: PassPlan | None = None
        self.is_idle = True
        """Whether the last step found nothing to do: nothing is ready until a message comes."""
        self.is_hurried = False
        """Whether another engine needs its turn before a burst could arrive."""
        self._idle_since_time = self._clock.monotonic()

    @property
    def is_draining(self) -> bool:
        return self._drain_deadline is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing runs, nothing waits and nothing new is let in."""
        return self.is_draining and not len(self._requests) and not self._waiting_commands

    def step(self) -> None:
        """Read the mailbox, and run one forward pass over everything that is ready."""
        self._command_s = 0.0
        while self._waiting_commands and self._command_s < _COMMAND_S:
            self._carry_out(self._waiting_commands.popleft())
        self._take_in()
        self._expire()
        parked_before = self.counters.stats.parked_total
        has_begun = self._admit()
        self._prefix.leave_cores(to_decode=self._scheduler.keeps_pace)
        prepare_s = self._prepare()
        if not self._has_pass_to_run:
            self._output.publish()  # before readers that were just dispatched compete for the interpreter
        has_run = self._run_pass(spent_s=prepare_s or 0.0)
        self._prefix.write_blocks(has_run=has_run, decodes=self._scheduler.decoding_count > 0)
        # Parking frees memory, so others may go on even though this step found nothing to do.
        has_parked = self.counters.stats.parked_total > parked_before
        self.is_idle = not (has_begun or has_run or has_parked) and prepare_s is None
        if not has_run or not self._has_pass_to_run:
            self._output.publish()
        self._warm_up_if_idle()

    def _warm_up_if_idle(self) -> None:
        now = self._clock.monotonic()
        if not self.is_idle or len(self._requests) or self.is_draining:
            self._idle_since_time = now
        elif now - self._idle_since_time >= _IDLE_BEFORE_WARM_UP_S:
            self._runner.warm_up_more()

    @property
    def _has_pass_to_run(self) -> bool:
        """Whether the next step will run a pass, which publishes this one's tokens just before it waits.
        Publishing wakes the event loop, which takes the interpreter's lock while the next pass is built.
        During a restore, whose reads make passes longer, a step publishes at its end: otherwise tokens came
        another 4 ms later (p99; 2-core x86)."""
        has_pass = bool(self._scheduler.decoding_count or self._scheduler.prefilling_count)
        return has_pass and not self._scheduler.loading_count

    def fail_all(self, error: IcehouseError) -> None:
        """End every request with `error`, those still in the mailbox too."""
        for message in self._mailbox.close():
            if isinstance(message, Submit):
                for request in message.requests:
                    self._output.emit(request.request_id, Failed(error))
            elif isinstance(message, QueryStats):
                message.reply(self.stats(), self._cache.stats(None))
            elif isinstance(message, Command):
                message.reply(error)
        for command in self._waiting_commands:
            command.reply(error)
        self._waiting_commands.clear()
        self._commands.fail_early(error)
        self._requests.abandon(error)
        self._output.publish()

    def flush(self, *, deadline_time: float) -> Iterator[float]:
        """Spill RAM's blocks until all are written or the deadline passes; yields as `tiers.spill.flush`."""
        assert self.is_done
        self._cache.keep_rates()
        spills, nodes = self._cache.spills, self._cache.tree.in_ram()
        for wait_s in flush(spills, nodes, clock=self._clock, deadline_time=deadline_time):
            yield wait_s
            self._take_in()

    @property
    def wait_s(self) -> float | None:
        """How long to wait for a message, given what the last step found; None means not at all."""
        if not self.is_idle or self._waiting_commands:
            return None
        deadlines = [d for d in (self._requests.nearest_deadline(), self._drain_deadline) if d is not None]
        left_s = min(deadlines, default=math.inf) - self._clock.monotonic()
        return min(_IDLE_WAIT_S, max(0.0, left_s))

    def _take_in(self) -> None:
        messages = self._mailbox.take_all(timeout_s=0.0)
        if work_count := sum(isinstance(message, Submit) for message in messages):
            may_wait = self.is_idle and not self.is_hurried
            messages += self._burst_wait.rest(self._mailbox, self._clock, may_wait, work_count)
        self._cache.tree.end_pins(self._clock.wall())
        for message in messages:
            self._receive(message)
        if not self._has_pass_to_run:
            self._output.publish()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Submit) and self.is_draining:
            self._requests.refuse(message.requests, shutting_down())
        elif isinstance(message, Submit):
            if self._scheduler.free_slot_count and not self._requests.has_capacity_for(message.requests):
                self._admit()  # running requests must not fill a short queue and block newcomers
            self._requests.receive(message.requests)
        elif isinstance(message, Cancel):
            self._requests.cancel(message.request_id, message.error)
        elif isinstance(message, QueryStats):
            self._commands.query(lambda cache: message.reply(self.stats(), cache))
        elif isinstance(message, Command):
            self._command(message)
        elif isinstance(message, DrainEngine):
            self._drain_deadline = message.deadline_time
        else:
            self._prefix.receive(message)

    def _command(self, message: Command) -> None:
        """Run a command, or queue it for the next step: one for a long prompt takes as long as a pass."""
        if (self._command_s < _COMMAND_S and not self._waiting_commands) or self.is_done:
            self._carry_out(message)
        elif len(self._waiting_commands) < _COMMAND_LIMIT:
            self._waiting_commands.append(message)
        else:
            message.reply(commands_waiting(len(self._waiting_commands)))

    def _carry_out(self, message: Command) -> None:
        began = self._clock.monotonic()
        self._commands.submit(message)
        self._command_s += self._clock.monotonic() - began

    def _expire(self) -> None:
        """End requests past their deadline, and every request once the drain's deadline has passed."""
        now = self._clock.monotonic()
        self._cache.waits.expire()
        self._requests.expire(now)
        if self._drain_deadline is not None and now >= self._drain_deadline:
            self._requests.fail_all(stopped_before_done())

    def _admit(self) -> bool:
        """Admit sequences that may start; return True if any sequence changed state."""
        self._requests.release_ended()  # frees their memory
        has_begun = False
        for ready in self._prefix.take_ready():
            if ready.phase is Phase.LOADING:
                self._scheduler.move(ready, Phase.RESTORING)
            elif ready.phase is Phase.FOLLOWING:
                self._begin(ready)
            else:
                continue  # it has ended meanwhile
            has_begun = True
        blocked: list[Sequence] = []
        for sequence in self._scheduler.candidates(self._clock.monotonic()):
            if self._scheduler.lets_nobody_pass(blocked):
                break
            if not self._scheduler.free_slot_count and not self._preemption.make_slot(sequence):
                break
            if self._preemption.may_start(sequence):
                for passed in blocked:
                    passed.passed_count += 1
                self._scheduler.admit(sequence)
                if not sequence.park_count:
                    sequence.admitted_time = self._clock.monotonic()
                self._begin(sequence)
            elif (error := self._preemption.hopeless(sequence)) is not None:
                self._requests.fail(sequence, error)
            else:
                if self._preemption.make_slot(sequence):
                    break  # the memory freed for it arrives in a later step, and is for nobody else
                blocked.append(sequence)
                continue
            has_begun = True
        self._preemption.note_blocked(is_blocked=bool(blocked), now=self._clock.monotonic())
        return has_begun

    def _begin(self, sequence: Sequence) -> None:
        """Look the prompt up; load its blocks, rebuild its caches, or open empty ones."""
        phase = self._prefix.begin(sequence)
        if phase is Phase.PREFILLING:
            self._runner.open(sequence.sequence_id)
            self._start_prefilling(sequence)
        else:
            self._scheduler.move(sequence, phase)

    def _prepare(self) -> float | None:
        """Continue rebuilding caches, first of sequences that still have blocks to read, then of the oldest,
        and then encode an image. Return how long it took, or None if there was nothing to do."""
        restoring, seeing = self._scheduler.restoring, self._preemption.image_to_encode()
        if not restoring and seeing is None:
            return None
        allowed_s = self._scheduler.restore_s(least_s=self._prefix.adopt_budget_s)
        began = self._clock.monotonic()
        spent_s = 0.0
        for sequence in sorted(restoring, key=lambda s: not self._prefix.awaits_load(s)):
            if spent_s >= allowed_s:
                break
            self._continue_restore(sequence, budget_s=allowed_s - spent_s)
            spent_s = self._clock.monotonic() - began
        if seeing is not None and spent_s < allowed_s:
            self._encode_image(seeing, budget_s=allowed_s - spent_s)
            spent_s = self._clock.monotonic() - began
        self._scheduler.note_restore(spent_s, allowed_s=allowed_s)
        return spent_s

    def _continue_restore(self, sequence: Sequence, *, budget_s: float) -> None:
        phase = self._prefix.continue_restore(sequence, budget_s=budget_s)
        if phase is Phase.PREFILLING:
            self._start_prefilling(sequence)
        elif phase is Phase.WAITING:
            self._begin(sequence)
        elif phase is Phase.LOADING:
            self._scheduler.move(sequence, phase)

    def _encode_image(self, sequence: Sequence, *, budget_s: float) -> None:
        """Encode the next image of a sequence for about `budget_s`, so that others decode meanwhile. Prefill
        stops before the image until it is encoded. If the tower fails on it, the sequence is ended."""
        span = sequence.next_image
        assert span is not None, f"sequence {sequence.sequence_id} waits for no image"
        part = sequence.request.whole_image(span)
        try:
            if self._runner.encode(sequence.sequence_id, part, budget_s=budget_s):
                sequence.encoded_token_count = span.end_token_index
        except IcehouseError as error:
            self._requests.fail(sequence, error)

    def _start_prefilling(self, sequence: Sequence) -> None:
        self._scheduler.move(sequence, Phase.PREFILLING)
        self._prefix.lead(sequence)
        if not sequence.has_started:
            sequence.has_started = True
            self._cache.settle(sequence.request, sequence.cache)
            if not sequence.request.is_prefetch:
                self.counters.stats.cached_token_total += sequence.cache.cached_token_count
            self._requests.emit(sequence, sequence.started())
        self._end_if_all_reported(sequence)

    def _run_pass(self, *, spent_s: float) -> bool:
        """Plan and run a pass, in a step that spent some time on restores; return False if there was nothing
        to run."""
        failed_before = self.counters.stats.failed_total
        plan = self._preemption.make_fit(self._scheduler.plan(spent_s=spent_s))
        self._requests.release_ended()
        # The last pass of a prompt that is measured or pooled may still be in flight.
        is_unread = any(sequence.unread_chunk_count for sequence in self._scheduler.running)
        if not (plan.chunks or self._scheduler.decoding_count or is_unread):
            return self.counters.stats.failed_total > failed_before
        chunks = [chunk.for_runner() for chunk in plan.chunks]
        for planned, chunk in zip(plan.chunks, chunks, strict=True):
            planned.sequence.unread_chunk_count += chunk.is_read
        # Measured and pooled results are reported pass by pass, in order.
        is_unread |= any(chunk.is_read for chunk in chunks)
        is_first = not (self._scheduler.decoding_count or is_unread) and any(chunk.row for chunk in chunks)
        result = self._runner.run(chunks, before_wait=self._output.publish, reads_at_once=is_first)
        if result.went_through:
            plan = self._scheduler.planned(plan.chunks_through(result.went_through))
        self._scheduler.note_run(plan)
        self._note_time(plan, result)
        for ran in plan.chunks:
            self._advance(ran)
        read = self._take_read(result)
        drawing = self._deliver(result.drawn)
        if result.leaves_device_idle:
            self._output.publish()  # not after the next pass, which takes a GPU's host 10 ms to build
        self._capture(plan.chunks, drawing)
        for sequence in read:
            self._end_if_all_reported(sequence)
        self._requests.release_ended()
        return True

    def _note_time(self, plan: PassPlan, result: PassResult) -> None:
        """Count what ran, and learn from the pass that was timed."""
        counters, stats = self.counters, self.counters.stats
        stats.step_total += 1
        stats.prefilled_token_total += plan.stored_count
        stats.output_token_total += len(result.drawn)
        timed, self._dispatched = self._dispatched if result.is_behind else plan, plan
        elapsed_s = result.elapsed_s
        if timed is None or not elapsed_s:
            return
        if timed.advanced_token_count:
            tokens_per_s = timed.advanced_token_count / max(timed.prefill_s(elapsed_s), 1e-9)
            stats.prefill_tokens_per_s = counters.prefill_rate.add(tokens_per_s)
            self._cache.rates.note_prefill(tokens_per_s)
        self._scheduler.note_time(timed, result)
        counters.passes_s.append(elapsed_s)
        if timed.rows.token_count:
            counters.decode_steps_s.append(elapsed_s)

    def _advance(self, chunk: PrefillChunk) -> None:
        """Account for a chunk that ran: report progress, and start decoding after the last one."""
        sequence = chunk.sequence
        sequence.processed_token_count += chunk.stored_count
        # However small the chunks are, progress is reported once per full-sized chunk.
        full = self._scheduler.limits.prefill_chunk_token_count
        is_full = sequence.is_prefilled or sequence.processed_token_count // full > chunk.start // full
        if chunk.stored_count and is_full and not sequence.park_count and not sequence.measures_prompt:
            self._report_progress(sequence)
        if chunk.is_last:
            self._scheduler.move(sequence, Phase.DECODING)

    def _take_read(self, result: PassResult) -> list[Sequence]:
        """Take the measured and pooled results of prompts and report them; return their sequences."""
        names = (*result.measured, *result.pooled)
        sequences = [sequence for name in names if (sequence := self._requests.find(name)) is not None]
        for sequence in sequences:
            if (pooled := result.pooled.get(sequence.sequence_id)) is not None:
                sequence.take_pooled(pooled)
            elif logprobs := sequence.take_prompt_logprobs(result.measured[sequence.sequence_id]):
                self._report_progress(sequence, logprobs)
        return sequences

    def _report_progress(self, sequence: Sequence, logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        total = len(sequence.input_token_ids)
        self._requests.emit(sequence, PrefillProgress(sequence.processed_token_count, total, logprobs))

    def _end_if_all_reported(self, sequence: Sequence) -> None:
        if sequence.is_all_reported:
            now = self._clock.monotonic()
            self._requests.finish(sequence, self._output.finish(sequence, sequence.limit_reason, now))
            self._requests.close(sequence)

    def _deliver(self, drawn: Iterable[Drawn]) -> list[Sequence]:
        """Take the drawn tokens; return the sequences that drew. Finished ones are still to be closed."""
        now = self._clock.monotonic()
        drawing: list[Sequence] = []
        for token in drawn:
            sequence = self._requests.find(token.sequence_id)
            if sequence is None or sequence.has_finished:
                continue  # it ended with an earlier token of the same pass
            if token.error is not None:
                self._requests.fail(sequence, token.error)
                continue
            if token.drafts is not None:
                self.counters.stats.drafted_token_total += token.drafts.proposed_count
                self.counters.stats.accepted_draft_token_total += token.drafts.accepted_count
            end = self._output.take_token(sequence, token, now)
            if end is not None:
                self._requests.finish(sequence, end)
            if sequence not in drawing:
                drawing.append(sequence)
        return drawing

    def _capture(self, chunks: Iterable[PrefillChunk], drawing: Iterable[Sequence]) -> None:
        """Capture the blocks that a pass completed, and close the sequences that it ended.

        Capturing copies blocks, so the pass's results are published first: a prompt's first token, a reply's
        last one.
        """
        begun = [c.sequence for c in chunks if c.stored_count and c.sequence.phase is not Phase.ENDED]
        ready = [sequence for sequence in drawing if sequence.phase is not Phase.ENDED]
        if any(self._prefix.has_to_keep(s, is_end=s.is_prefilled) for s in begun) or any(
            self._prefix.has_to_keep(s, is_end=s.has_finished) for s in ready
        ):
            self._output.publish()
        for sequence in begun:
            self._prefix.capture_input(sequence)
            self._end_if_all_reported(sequence)
        for sequence in ready:
            self._prefix.capture(sequence, is_end=sequence.has_finished)
            if sequence.has_finished:
                self._requests.close(sequence)

    def _park(self, sequence: Sequence) -> None:
        """Take a sequence's slot away. Its blocks stay in the tiers, and it resumes from them later."""
        self._prefix.forget(sequence)
        self._prefix.end(sequence)
        self._runner.release([sequence.sequence_id])
        self._scheduler.park(sequence)
        self.counters.stats.parked_total += 1

    def stats(self) -> EngineStats:
        """Return a copy of the engine's counters, completed with current values."""
        memory, images = self._runner.memory(), self._runner.image_use()
        return dataclasses.replace(
            self.counters.stats,
            uptime_s=self._clock.monotonic() - self._start_time,
            mailbox_count=len(self._mailbox),
            mailbox_limit=self._mailbox.limit,
            waiting_count=self._scheduler.waiting_count,
            waiting_limit=self._scheduler.queue.limits.request_limit,
            loading_count=self._scheduler.loading_count,
            prefilling_count=self._scheduler.prefilling_count,
            decoding_count=self._scheduler.decoding_count,
            decoding_limit=self._scheduler.limits.running_limit,
            decode_step_p50_s=quantile(self.counters.decode_steps_s, 0.5),
            decode_step_p99_s=quantile(self.counters.decode_steps_s, 0.99),
            pass_p50_s=quantile(self.counters.passes_s, 0.5),
            pass_p99_s=quantile(self.counters.passes_s, 0.99),
            active_memory_bytes=memory.active_bytes,
            peak_memory_bytes=memory.peak_bytes,
            memory_limit_bytes=self._preemption.guard.limit_bytes,
            kv_used_bytes=self._preemption.guard.held_bytes(self._scheduler.running),
            kv_limit_bytes=self._preemption.guard.kv_limit_bytes,
            encoded_image_total=images.encoded_total,
            reused_image_total=images.reused_total,
            image_encode_s=images.encode_s,
            image_feature_bytes=images.size_bytes,
            image_feature_limit_bytes=images.limit_bytes,
        )
