"""Requests, from admission to their end, whatever the reason for it (inference thread).

A new request becomes a waiting sequence, or its caller is told why not. Every end passes through here, so
that the slot, the caches and the hold on shared blocks are given back together, and the end is counted and
reported once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence as ReadSequence

from icehouse_server.clock import Clock
from icehouse_server.domain.events import Event, Failed, Finished
from icehouse_server.domain.ids import RequestId, SequenceId
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.engine.core.engine_counters import Counters
from icehouse_server.engine.core.ports import Decoder, Runner
from icehouse_server.engine.core.refusals import past_deadline, too_many_completions
from icehouse_server.engine.core.sequence import Sequence
from icehouse_server.engine.output import Output
from icehouse_server.engine.prefix_cache.controller import CacheController
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.preemption import SchedulingParts
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.errors import (
    Cancelled,
    DeadlineExceeded,
    IcehouseError,
    ModelOutputInvalid,
    Overloaded,
    Reason,
)

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


class Requests:
    """Accepts requests, finds their sequences, and ends them."""

    def __init__(
        self,
        *,
        runner: Runner,
        prefix: CacheController,
        scheduling: SchedulingParts,
        output: Output,
        counters: Counters,
        tokenizer: Decoder,
        context_token_limit: int,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._prefix = prefix
        self._scheduler, guard = scheduling
        self._queue = self._scheduler.queue
        self._admission = Admission(scheduler=self._scheduler, counters=counters, guard=guard)
        self._output = output
        self._counters = counters
        self._tokenizer = tokenizer
        self._context_token_limit = context_token_limit
        self._clock = clock
        self._by_request: dict[RequestId, Sequence] = {}
        self._by_id: dict[SequenceId, Sequence] = {}
        self._ended: list[SequenceId] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def has_capacity_for(self, requests: ReadSequence[GenerationRequest]) -> bool:
        """Whether the queue has room for these requests, which share a prompt."""
        first = requests[0]
        return self._queue.has_capacity_for(
            len(first.prompt_token_ids), tenant=first.tenant, request_count=len(requests)
        )

    def receive(self, requests: ReadSequence[GenerationRequest]) -> None:
        """Accept requests for the same prompt, or refuse them all."""
        sequences = [self._sequence_of(request) for request in requests]
        refusal = self._admission.refusal(
            requests[0],
            output_token_limit=sequences[0].output_token_limit,
            now=self._clock.monotonic(),
            request_count=len(requests),
        )
        if refusal is not None:
            self.refuse(requests, refusal)
            return
        for sequence in sequences:
            self._queue.add(sequence)
            if not sequence.request.is_prefetch:
                self._counters.stats.accepted_total += 1
                self._counters.stats.prompt_token_total += len(sequence.request.prompt_token_ids)
            self._by_request[sequence.request.request_id] = sequence
            self._by_id[sequence.sequence_id] = sequence

    def refuse(self, requests: ReadSequence[GenerationRequest], error: IcehouseError) -> None:
        """Tell the callers that none of the requests was accepted."""
        for request in requests:
            self._counters.stats.rejected_total += not request.is_prefetch
            self._output.emit(request.request_id, Failed(error))

    def find(self, sequence_id: SequenceId) -> Sequence | None:
        """Return the sequence with this id, or None once it has ended."""
        return self._by_id.get(sequence_id)

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Add an event to those that this step publishes."""
        self._output.emit(sequence.request.request_id, event)

    def cancel(self, request_id: RequestId, error: IcehouseError) -> None:
        """End a request whose caller has gone; it may have ended already."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self.fail(sequence, error)

    def expire(self, now: float) -> None:
        """End the requests past their deadline."""
        for sequence in list(self._by_request.values()):
            deadline = sequence.request.deadline_time
            if deadline is not None and now >= deadline:
                self.fail(sequence, past_deadline(sequence, now))

    def finish(self, sequence: Sequence, end: Finished) -> None:
        """Report to the caller that its request ran to its end; `close` follows."""
        if not sequence.request.is_prefetch:
            self._counters.stats.finished_total += 1
            self._counters.service.add(self._clock.monotonic() - sequence.admitted_time)
        sequence.has_finished = True
        self.emit(sequence, end)

    def close(self, sequence: Sequence) -> None:
        """Give back what an ended request held; `release_ended` frees its caches."""
        self._prefix.end(sequence)
        request = sequence.request
        if request.is_prefetch:
            self._prefix.cache.prefetched.end(sequence)
        if request.ends_session and sequence.has_finished:
            self._prefix.cache.end_session(request.tenant, request.session_id)
        self._scheduler.remove(sequence)
        self._ended.append(sequence.sequence_id)
        del self._by_request[sequence.request.request_id]
        del self._by_id[sequence.sequence_id]

    def fail(self, sequence: Sequence, error: IcehouseError) -> None:
        """End a request early. The blocks it computed stay, unless they hold NaN or infinite numbers."""
        if not sequence.request.is_prefetch:
            self._count(error)
        if isinstance(error, ModelOutputInvalid):
            self._prefix.discard(sequence)
        else:
            self._prefix.forget(sequence)
        self.close(sequence)
        self.emit(sequence, Failed(error))

    def fail_all(self, error: IcehouseError) -> None:
        """End every request in order, each as `fail` does; only between steps of a healthy loop."""
        for sequence in list(self._by_request.values()):
            self.fail(sequence, error)

    def release_ended(self) -> None:
        """Free the caches of all ended sequences at once, since each release may rearrange the others."""
        if self._ended:
            self._runner.release(self._ended)
            self._ended = []

    def nearest_deadline(self) -> float | None:
        """Return the earliest deadline of all requests; None if none has one."""
        deadlines = (s.request.deadline_time for s in self._by_request.values())
        return min((time for time in deadlines if time is not None), default=None)

    def abandon(self, error: IcehouseError) -> None:
        """End every call with `error` and touch nothing else: the loop has ended or failed."""
        for request_id in self._by_request:
            self._count(error)
            self._output.emit(request_id, Failed(error))
        self._by_request.clear()
        self._by_id.clear()

    def _sequence_of(self, request: GenerationRequest) -> Sequence:
        self._next_id += 1  # ids are never reused
        tokenizer = self._tokenizer
        return Sequence.of(
            request,
            sequence_id=SequenceId(self._next_id - 1),
            decode=tokenizer.decode_with_markers if request.shows_markers else tokenizer.decode,
            context_token_limit=self._context_token_limit,
        )

    def _count(self, error: IcehouseError) -> None:
        """Ends that the caller chose, directly or by a deadline, count as cancels; the rest as failures."""
        if isinstance(error, Cancelled | DeadlineExceeded):
            self._counters.stats.cancelled_total += 1
        else:
            self._counters.stats.failed_total += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What is ahead of a new request, and when its first token would come (None until rates are measured)."""

    requests_ahead: int
    tokens_ahead: int
    ttft_s: float | None


class Admission:
    """Judges new requests by the queue, the measured rates and the memory."""

    def __init__(self, *, scheduler: Scheduler, counters: Counters, guard: MemoryGuard) -> None:
        self._scheduler, self._queue = scheduler, scheduler.queue
        self._counters = counters
        self._guard = guard

    def refusal(
        self, request: GenerationRequest, *, output_token_limit: int, now: float, request_count: int = 1
    ) -> IcehouseError | None:
        """Return why a request, or this many like it, may not even wait; None if it may."""
        token_count = len(request.prompt_token_ids)
        never = self._guard.never_fits(
            token_count + min(output_token_limit, request.max_output_tokens), request
        )
        if never is not None:
            return never
        if request_count > self._queue.limits.request_limit:
            return too_many_completions(request_count, self._queue.limits.request_limit)
        prediction = self.predict(request)
        if not self._queue.has_capacity_for(token_count, tenant=request.tenant, request_count=request_count):
            return self._full(prediction)
        if request.deadline_time is not None and prediction.ttft_s is not None:
            left_s = request.deadline_time - now
            if prediction.ttft_s > left_s:
                return self._too_late(prediction, left_s)
        return None

    def predict(self, request: GenerationRequest) -> Prediction:
        """Predict a newcomer's first token from what is ahead of it and the rates measured here.

        What the cache may save is not counted. A deadline may be missed, but no hit is refused: without a
        queue, only prompts that would be late anyway are turned away.
        """
        requests_ahead, tokens_ahead = self._queue.tokens_ahead_of(request.priority, tenant=request.tenant)
        tokens_ahead += self._scheduler.prefill_backlog_tokens(request)
        rate = self._counters.stats.prefill_tokens_per_s
        if rate <= 0.0:
            return Prediction(requests_ahead, tokens_ahead, None)
        share = 0.5 if self._scheduler.decoding_count else 1.0
        ttft_s = tokens_ahead / (rate * share)
        # A tenant that runs nothing is given a slot.
        free_slots = max(self._scheduler.free_slot_count, int(not self._queue.running_count(request.tenant)))
        if requests_ahead >= free_slots and self._counters.service.value > 0.0:
            turns = (requests_ahead - free_slots + 1) / max(1, self._scheduler.limits.running_limit)
            ttft_s = max(ttft_s, turns * self._counters.service.value)
        return Prediction(requests_ahead, tokens_ahead, ttft_s)

    def _full(self, prediction: Prediction) -> Overloaded:
        limits = self._queue.limits
        delay_s = self._retry_after_s(prediction)
        return Overloaded(
            Reason.QUEUE_FULL,
            f"{len(self._queue)} requests with {self._queue.token_count} tokens are waiting; the limits are "
            f"{limits.request_limit} requests and {limits.token_limit or 'any number of'} tokens; "
            f"try again in about {delay_s:.1f} s",
            retry_after_s=delay_s,
            metadata={
                "waiting_count": len(self._queue),
                "waiting_limit": limits.request_limit,
                "waiting_token_count": self._queue.token_count,
                "waiting_token_limit": limits.token_limit,
                "queue_position": prediction.requests_ahead,
            },
        )

    def _too_late(self, prediction: Prediction, left_s: float) -> Overloaded:
        assert prediction.ttft_s is not None
        return Overloaded(
            Reason.DEADLINE_UNREACHABLE,
            f"the first token is expected in {prediction.ttft_s:.2f} s, but the deadline is in "
            f"{left_s:.2f} s; allow more time or try another replica",
            retry_after_s=self._retry_after_s(prediction),
            metadata={
                "predicted_ttft_s": f"{prediction.ttft_s:.3f}",
                "deadline_s": f"{left_s:.3f}",
                "queue_position": prediction.requests_ahead,
                "tokens_ahead": prediction.tokens_ahead,
            },
        )

    def _retry_after_s(self, prediction: Prediction) -> float:
        """Return when a slot may be free: the time of what is ahead, per request ahead."""
        if prediction.ttft_s is None:
            return 1.0
        per_request = prediction.ttft_s / max(1, prediction.requests_ahead)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(per_request * 10) / 10))
