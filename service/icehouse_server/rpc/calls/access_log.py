"""Access log: one line per ended call, who, how it ended, where the time went. Never prompt or output."""

from __future__ import annotations

import logging

from icehouse_server.domain.call import CallRecord

_logger = logging.getLogger("icehouse.access")


class AccessLog:
    """Writes the lines. Event loop."""

    def write(self, record: CallRecord, *, trace_id: str) -> None:
        """Write one call's line; `trace_id` is empty where nothing traces."""
        _logger.info("call_ended", extra=facts_of(record, trace_id=trace_id))


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
