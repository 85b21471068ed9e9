"""Access log: one line per ended call, who, how it ended, where the time went. Never prompt or output.

Of calls that were refused before anything was done for them so many a second have a line, for each tenant
and for all who prove nothing together: anybody who reaches the server could fill its disk with them. The next
line says how many were left out; metrics count them all.
"""

from __future__ import annotations

import logging

from icehouse_server.clock import Clock
from icehouse_server.domain.call import CallRecord
from icehouse_server.rpc.access import caller as callers

_logger = logging.getLogger("icehouse.access")

REFUSALS_PER_S = 20
REFUSAL_BURST_COUNT = 64
"""Lines of refusals that are written at once."""


class AccessLog:
    """Writes the lines. Event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusals: dict[str, _Allowance] = {}
        """By tenant that has proved who it is, so there are not many."""

    def write(self, record: CallRecord, *, trace_id: str) -> None:
        """Write one call's line; `trace_id` is empty where nothing traces."""
        left_out_count = 0
        if record.reason and record.started is None:
            allowance = self._refusals.setdefault(callers.current.get().tenant or "", _Allowance())
            if not allowance.take(self._clock.monotonic()):
                return
            left_out_count, allowance.left_out_count = allowance.left_out_count, 0
        facts = facts_of(record, trace_id=trace_id)
        if left_out_count:
            facts["left_out"] = left_out_count
        _logger.info("call_ended", extra=facts)


class _Allowance:
    """So many lines at once, then so many a second."""

    def __init__(self) -> None:
        self.left_out_count = 0
        self._due_time = float("-inf")

    def take(self, now: float) -> bool:
        """Say whether a line may be written now; one that may not is counted."""
        due_time = max(self._due_time, now - REFUSAL_BURST_COUNT / REFUSALS_PER_S) + 1 / REFUSALS_PER_S
        # What a clock's float loses in so many steps is no line.
        if due_time > now + 1e-6:
            self.left_out_count += 1
            return False
        self._due_time = due_time
        return True


def facts_of(record: CallRecord, *, trace_id: str) -> dict[str, object]:
    """Return the line's fields in their order; what a call never came to is left out."""
    facts: dict[str, object] = {
        "method": record.method,
        "code": record.code,
        "duration_s": round(record.duration_s, 6),
        "request_id": record.request_id,
        "peer": record.peer.value,
    }
    if record.reason:
        facts["reason"] = record.reason
    if record.tenant:
        facts["tenant"] = record.tenant
    if record.session_id:
        facts["session_id"] = record.session_id
    if record.prompt_token_count:
        facts["prompt_tokens"] = record.prompt_token_count
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
