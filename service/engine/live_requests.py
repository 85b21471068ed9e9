"""The requests that were accepted and have not ended, and each way one of them ends (inference thread).

Whatever ends a request passes through here, so that its place, its caches and its promises are given
back together, it is counted once, and its caller is told once.
"""

from __future__ import annotations

from service.clock import Clock
from service.domain.events import Event, Failed, Finished
from service.domain.ids import RequestId
from service.domain.request import GenerationRequest
from service.engine.counters import Counters
from service.engine.delivery import Delivery
from service.engine.endings import past_deadline
from service.engine.ids import SequenceId
from service.engine.ports import Runner
from service.engine.prefix_desk import PrefixDesk
from service.engine.scheduler import Scheduler
from service.engine.sequence import Sequence
from service.errors import Cancelled, DeadlineExceeded, IcehouseError


class LiveRequests:
    """Finds a sequence by its request or its own id, and ends it."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        prefix: PrefixDesk,
        delivery: Delivery,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._prefix = prefix
        self._delivery = delivery
        self._counters = counters
        self._clock = clock
        self._by_request: dict[RequestId, Sequence] = {}
        self._by_id: dict[SequenceId, Sequence] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def next_id(self) -> SequenceId:
        """Return the id of the next sequence; ids are never used twice."""
        self._next_id += 1
        return SequenceId(self._next_id - 1)

    def accept(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self._counters.accepted_total += 1
        self._counters.prompt_token_total += len(sequence.request.prompt_token_ids)
        self._by_request[sequence.request.request_id] = sequence
        self._by_id[sequence.sequence_id] = sequence

    def refuse(self, request: GenerationRequest, error: IcehouseError) -> None:
        """Tell the caller of a request that was never taken in."""
        self._counters.rejected_total += 1
        self._delivery.tell(request.request_id, Failed(error))

    def find(self, sequence_id: SequenceId) -> Sequence | None:
        """Return a sequence that the runner names, None once it has ended."""
        return self._by_id.get(sequence_id)

    def tell(self, sequence: Sequence, event: Event) -> None:
        """Add an event to what the step publishes."""
        self._delivery.tell(sequence.request.request_id, event)

    def cancel(self, request_id: RequestId, error: IcehouseError) -> None:
        """End a request that nobody waits for; it may have ended already."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self.fail(sequence, error)

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        for sequence in list(self._by_request.values()):
            deadline = sequence.request.deadline_time
            if deadline is not None and now >= deadline:
                self.fail(sequence, past_deadline(sequence, now))

    def finish(self, sequence: Sequence, end: Finished) -> None:
        """End a request that ran to its end."""
        self._counters.note_finished(self._clock.monotonic() - sequence.admitted_time)
        self._end(sequence, end)

    def fail(self, sequence: Sequence, error: IcehouseError) -> None:
        """End a request before its own end; the blocks it computed are kept."""
        self._count(error)
        self._prefix.forget(sequence)
        self._end(sequence, Failed(error))

    def fail_all(self, error: IcehouseError) -> None:
        """End every request in order, each as `fail` does; only between steps of a sound loop."""
        for sequence in list(self._by_request.values()):
            self.fail(sequence, error)

    def abandon(self, error: IcehouseError) -> None:
        """Tell every caller of `error` and touch nothing else: the loop is over, or broken."""
        for request_id in self._by_request:
            self._count(error)
            self._delivery.tell(request_id, Failed(error))
        self._by_request.clear()
        self._by_id.clear()

    def _count(self, error: IcehouseError) -> None:
        """What callers wanted, themselves or by a deadline, is a cancel; what the server did is a failure."""
        if isinstance(error, Cancelled | DeadlineExceeded):
            self._counters.cancelled_total += 1
        else:
            self._counters.failed_total += 1

    def _end(self, sequence: Sequence, event: Finished | Failed) -> None:
        self._prefix.end(sequence)
        self._scheduler.remove(sequence)
        self._runner.release([sequence.sequence_id])
        del self._by_request[sequence.request.request_id]
        del self._by_id[sequence.sequence_id]
        self.tell(sequence, event)
