"""Watchers of calls: metrics, traces, load reports, access log, slow requests. Event loop; none may block.

The code that starts the server chooses them (`Telemetry`).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.call import CallRecord
from icehouse_server.domain.stats import EngineStats, GroupStats, KvEventStats, SlowRequest
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.shares import RateLimit
from icehouse_server.telemetry.call_metrics import CallMetrics

if TYPE_CHECKING:
    # This needs an optional extra.
    from icehouse_server.telemetry.call_spans import CallSpans


ReadGroup = Callable[[EngineStats | None, CacheStats | None], GroupStats]
"""Makes a group's counters from those of the model on rank 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Telemetry:
    """The server's watchers. The default fits tests: only the access log."""

    wire: tuple[CallMetrics, ...] = ()
    calls: tuple[CallMetrics, ...] = ()
    tracer: CallSpans | None = None
    has_load_report: bool = False
    has_access_log: bool = True
    sample_interval_s: float | None = None
    """None if nothing needs samples."""
    kv_events: Callable[[], KvEventStats] = KvEventStats
    """Called for each sample."""
    group: ReadGroup | None = None
    """None if a single machine serves."""


_logger = logging.getLogger("icehouse.access")

REFUSAL_LINES_PER_S = 20
REFUSAL_LINE_BURST_COUNT = 64
"""Burst of refusal lines that are written at once."""


class AccessLog:
    """Writes one line for each ended call: who, how it ended, where the time went. Never prompt or output.

    Lines about refusals are limited per second, for each tenant and for all callers without credentials
    together: otherwise anybody could fill the disk. The next line says how many were left out; metrics count
    them all.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusals = RateLimit(rate_per_s=REFUSAL_LINES_PER_S, burst_count=REFUSAL_LINE_BURST_COUNT)
        self._left_out: collections.Counter[str] = collections.Counter()
        """By tenant with credentials, so it stays small."""

    def write(self, record: CallRecord, *, trace_id: str) -> None:
        """Write one call's line; `trace_id` is empty if tracing is off."""
        left_out_count = 0
        if record.reason and record.started is None:
            tenant = callers.current.get().tenant or ""
            if not self._refusals.take(tenant, now=self._clock.monotonic()):
                self._left_out[tenant] += 1
                return
            left_out_count = self._left_out.pop(tenant, 0)
        facts = log_fields_of(record, trace_id=trace_id)
        if left_out_count:
            facts["left_out"] = left_out_count
        _logger.info("call_ended", extra=facts)


def log_fields_of(record: CallRecord, *, trace_id: str) -> dict[str, object]:
    """Return the line's fields in order, without those that the call never reached."""
    facts: dict[str, object] = {
        "method": record.method,
        "code": record.code,
        "duration_s": round(record.duration_s, 6),
        "request_id": record.request_id,
        "peer": record.peer.value,
    }
    known = {
        "reason": record.reason,
        "tenant": record.tenant,
        "session_id": record.session_id,
        "agent_id": record.agent_id,
        "parent_session_id": record.parent_session_id,
        "prompt_tokens": record.prompt_token_count,
    }
    facts |= {name: value for name, value in known.items() if value}
    if record.started is not None:
        facts["cached_tokens"] = record.started.cache.cached_token_count
        facts["queue_s"] = round(record.started.queue_s, 6)
    if (usage := record.usage) is not None:
        facts["output_tokens"] = usage.output_token_count
        facts["restore_s"] = round(usage.cache.restore_s, 6)
        facts["prefill_s"] = round(usage.prefill_s, 6)
        facts["ttft_s"] = round(usage.ttft_s, 6)
        facts["decode_s"] = round(usage.decode_s, 6)
    if trace_id:
        facts["trace_id"] = trace_id
    return facts


SLOW_COUNT_LIMIT = 512
"""Number of ended requests that are remembered."""

SLOW_RECENT_S = 600.0
"""Older requests are not shown."""

SLOW_SHOWN_COUNT = 10


class SlowRequests:
    """The slowest of the latest requests that reached the engine, for `icehouse top`. Bounded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: collections.deque[tuple[float, CallRecord]] = collections.deque(maxlen=SLOW_COUNT_LIMIT)

    def call_ended(self, record: CallRecord) -> None:
        """Remember a call if it was a request that left the queue."""
        if record.started is not None:
            self._ended.append((self._clock.monotonic(), record))

    def slowest(self, *, tenant: str | None) -> tuple[SlowRequest, ...]:
        """Return the slowest recent requests, slowest first, of one tenant, or of all if None."""
        now = self._clock.monotonic()
        recent = [
            (time, record)
            for time, record in self._ended
            if now - time <= SLOW_RECENT_S and tenant in (None, record.tenant)
        ]
        chosen = heapq.nlargest(SLOW_SHOWN_COUNT, recent, key=lambda pair: pair[1].duration_s)
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
