"""Slow requests: the slowest of the last ones, for `icehouse top`, and where their time went."""

from __future__ import annotations

import collections
import dataclasses
import heapq

from icehouse_server.clock import Clock
from icehouse_server.domain.call import CallRecord

KEPT_COUNT = 512
"""Ended requests that are looked at."""

RECENT_S = 600.0
"""An older one is no longer recent."""

SHOWN_COUNT = 10


@dataclasses.dataclass(frozen=True, slots=True)
class SlowRequest:
    """One ended request."""

    age_s: float
    """Since it ended."""
    record: CallRecord


class SlowRequests:
    """Bounded memory of ended requests that reached the engine. Owned by the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: collections.deque[tuple[float, CallRecord]] = collections.deque(maxlen=KEPT_COUNT)

    def call_ended(self, record: CallRecord) -> None:
        """Remember a call, if it was a request that left the queue."""
        if record.started is not None:
            self._ended.append((self._clock.monotonic(), record))

    def slowest(self, *, tenant: str | None) -> list[SlowRequest]:
        """Return the slowest recent ones, the slowest first; of one tenant, or of all for None."""
        now = self._clock.monotonic()
        recent = [
            (time, record)
            for time, record in self._ended
            if now - time <= RECENT_S and tenant in (None, record.tenant)
        ]
        chosen = heapq.nlargest(SHOWN_COUNT, recent, key=lambda pair: pair[1].duration_s)
        return [SlowRequest(now - time, record) for time, record in chosen]
