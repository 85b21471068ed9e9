"""Slow requests to their message. Pure functions."""

from __future__ import annotations

from icehouse.v1 import slow_request_pb2

from service.rpc.convert import duration_proto
from service.rpc.slow_requests import SlowRequest


def slow_request_proto(slow: SlowRequest) -> slow_request_pb2.SlowRequest:
    """Return one slow request; what it never came to is absent."""
    record, started, usage = slow.record, slow.record.started, slow.record.usage
    message = slow_request_pb2.SlowRequest(
        request_id=record.request_id,
        method=record.method,
        code=record.code,
        age=duration_proto(slow.age_s),
        total_duration=duration_proto(record.duration_s),
        prompt_tokens=record.prompt_token_count,
    )
    if started is not None:
        message.queue_duration.CopyFrom(duration_proto(started.queue_s))
        message.restore_duration.CopyFrom(duration_proto(started.cache.restore_s))
        message.cached_tokens = started.cache.cached_token_count
    if usage is not None:
        message.prefill_duration.CopyFrom(duration_proto(usage.prefill_s))
        message.decode_duration.CopyFrom(duration_proto(usage.decode_s))
        message.output_tokens = usage.output_token_count
    return message
