"""Slow requests: the slowest of the last ones, for `icehouse top`, and where their time went."""

from __future__ import annotations

import collections
import heapq

from icehouse_server.clock import Clock
from icehouse_server.domain.call import CallRecord
from icehouse_server.domain.stats import SlowRequest

KEPT_COUNT = 512
"""Ended requests that are looked at."""

RECENT_S = 600.0
"""An older one is no longer recent."""

SHOWN_COUNT = 10


class SlowRequests:
    """Bounded memory of ended requests that reached the engine. Owned by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: collections.deque[tuple[float, CallRecord]] = collections.deque(maxlen=KEPT_COUNT)

    def call_ended(self, record: CallRecord) -> None:
        """Remember a call, if it was a request that left the queue."""
        if record.started is not None:
            self._ended.append((self._clock.monotonic(), record))

    def slowest(self, *, tenant: str | None) -> tuple[SlowRequest, ...]:
        """Return the slowest recent ones, the slowest first; of one tenant, or of all for None."""
        now = self._clock.monotonic()
        recent = [
            (time, record)
            for time, record in self._ended
            if now - time <= RECENT_S and tenant in (None, record.tenant)
        ]
        chosen = heapq.nlargest(SHOWN_COUNT, recent, key=lambda pair: pair[1].duration_s)
        return tuple(_slow_request(record, age_s=now - time) for time, record in chosen)


def _slow_request(record: CallRecord, *, age_s: float) -> SlowRequest:
    started, usage = record.started, record.usage
    assert started is not None, f"{record.request_id} never left the queue"
    return SlowRequest(
        request_id=record.request_id,
        method=record.method,
        code=record.code,
        age_s=age_s,
        total_duration_s=record.duration_s,
        queue_duration_s=started.queue_s,
        restore_duration_s=started.cache.restore_s,
        prefill_duration_s=None if usage is None else usage.prefill_s,
        decode_duration_s=None if usage is None else usage.decode_s,
        prompt_token_count=record.prompt_token_count,
        cached_token_count=started.cache.cached_token_count,
        output_token_count=0 if usage is None else usage.output_token_count,
    )
