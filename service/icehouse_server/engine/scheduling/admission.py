"""Admission control: who may wait, who may start, who is refused, early and in numbers (inference thread)."""

from __future__ import annotations

import dataclasses
import math

from icehouse_server.domain.request import GenerationRequest
from icehouse_server.engine.core.counters import Counters
from icehouse_server.engine.core.refusals import too_many_completions
from icehouse_server.engine.scheduling.memory_guard import MemoryGuard
from icehouse_server.engine.scheduling.scheduler import Scheduler
from icehouse_server.errors import IcehouseError, Overloaded, Reason

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What is ahead of a new request, and when its first token would come; None while nothing is measured."""

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
        """Return why a request, or so many alike, may not even wait, or None when it may."""
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
        """Predict a newcomer's first token from what is before it and the rates measured here.

        What the cache may save is not counted in, so a deadline is missed rather than a hit refused:
        only prompts that would be late even without any queue are turned away by their own length.
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
            f"{len(self._queue)} requests with {self._queue.token_count} tokens wait, and the limits are "
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
            f"the first token is expected in {prediction.ttft_s:.2f} s and the deadline is in "
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
        """Return when a slot may be free: the time of what is ahead, shared by those who wait."""
        if prediction.ttft_s is None:
            return 1.0
        per_request = prediction.ttft_s / max(1, prediction.requests_ahead)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(per_request * 10) / 10))
