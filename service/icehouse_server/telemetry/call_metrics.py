"""Metrics of calls, counted when a call ends: gRPC's standard ones, and where a request's time went.

`grpc.server.call.*` after gRPC proposal A66, `gen_ai.server.*` after OpenTelemetry's semantic
conventions for generative AI. Nothing is counted per token.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from icehouse_server.domain.call import PROVIDER, CallRecord, Operation, WireRecord
from icehouse_server.domain.events import CacheReport, Usage
from icehouse_server.telemetry.metric import Metric, MetricKind

if TYPE_CHECKING:
    # Slow to import.
    from icehouse_server.telemetry.prometheus import PrometheusMeter

_CALL_BUCKETS_S = (
    *(0.0, 1e-05, 5e-05, 0.0001, 0.0003, 0.0006, 0.0008, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.013, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3),
    *(0.4, 0.5, 0.65, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
_SIZE_BUCKETS = (
    *(0.0, 1024.0, 2048.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0),
    *(67108864.0, 268435456.0, 1073741824.0, 4294967296.0),
)
_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    # Beyond the convention's buckets: long prompts on a small machine.
    *(20.0, 40.0, 80.0),
)
_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_BUCKETS_S = tuple(0.01 * 2**i for i in range(14))
_TOKEN_COUNT_BUCKETS = tuple(float(4**i) for i in range(1, 11))

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")

_CALL = ("grpc.method", "grpc.status")

# fmt: off
# Name, kind and unit; what it means; labels and buckets.
CALLS_STARTED = Metric("grpc.server.call.started", MetricKind.COUNTER, "{call}",
    "Calls started, of every service; unknown methods count as other.", ("grpc.method",))
CALL_DURATION = Metric("grpc.server.call.duration", MetricKind.HISTOGRAM, "s",
    "From a call's arrival until its status was sent.", _CALL, _CALL_BUCKETS_S)
CALL_SENT = Metric("grpc.server.call.sent_total_compressed_message_size", MetricKind.HISTOGRAM, "By",
    "Bytes of a call's response messages, without framing (nothing is compressed unless a client asks).",
    _CALL, _SIZE_BUCKETS)
CALL_RECEIVED = Metric("grpc.server.call.rcvd_total_compressed_message_size", MetricKind.HISTOGRAM, "By",
    "Bytes of a call's request messages, without framing (after decompression).", _CALL, _SIZE_BUCKETS)
CALLS_REFUSED = Metric("icehouse.call.errors", MetricKind.COUNTER, "{call}",
    "Calls of Icehouse's own services that ended with a status other than OK, by reason.",
    (*_CALL, "icehouse.reason"))
REQUEST_DURATION = Metric("gen_ai.server.request.duration", MetricKind.HISTOGRAM, "s",
    "From a request's arrival to its last token or, with an error type, to its refusal or failure.",
    (*_GEN_AI, "error.type"), _REQUEST_BUCKETS_S)
FIRST_TOKEN = Metric("gen_ai.server.time_to_first_token", MetricKind.HISTOGRAM, "s",
    "From a request's arrival to its first token.", _GEN_AI, _FIRST_TOKEN_BUCKETS_S)
PER_TOKEN = Metric("gen_ai.server.time_per_output_token", MetricKind.HISTOGRAM, "s",
    "Mean time between the tokens of one request, after its first.", _GEN_AI, _TOKEN_BUCKETS_S)
QUEUE_TIME = Metric("icehouse.request.queue.duration", MetricKind.HISTOGRAM, "s",
    "From a request's arrival until it left the queue.", (), _REQUEST_BUCKETS_S)
RESTORE_TIME = Metric("icehouse.request.restore.duration", MetricKind.HISTOGRAM, "s",
    "Time to restore a request's cached prefix; only requests that reused one.", (), _REQUEST_BUCKETS_S)
PREFILL_TIME = Metric("icehouse.request.prefill.duration", MetricKind.HISTOGRAM, "s",
    "Time to compute the rest of a request's prompt, up to its first token.", (), _REQUEST_BUCKETS_S)
FIRST_TOKEN_BY_REUSE = Metric("icehouse.request.first_token.duration", MetricKind.HISTOGRAM, "s",
    "From a request's arrival to its first token, by where its cached prefix came from: nowhere (cold), "
    "only RAM, or also SSD.", ("icehouse.reuse",), _FIRST_TOKEN_BUCKETS_S)
PROMPT_TOKENS = Metric("icehouse.request.prompt.tokens", MetricKind.HISTOGRAM, "{token}",
    "Tokens of a request's prompt.", (), _TOKEN_COUNT_BUCKETS)
OUTPUT_TOKENS = Metric("icehouse.request.output.tokens", MetricKind.HISTOGRAM, "{token}",
    "Output tokens of a request.", (), _TOKEN_COUNT_BUCKETS)
# fmt: on

CALL_METRICS: tuple[Metric, ...] = (
    *(CALLS_STARTED, CALL_DURATION, CALL_SENT, CALL_RECEIVED, CALLS_REFUSED),
    *(REQUEST_DURATION, FIRST_TOKEN, PER_TOKEN, QUEUE_TIME, RESTORE_TIME, PREFILL_TIME),
    FIRST_TOKEN_BY_REUSE,
    *(PROMPT_TOKENS, OUTPUT_TOKENS),
)


class PromptReuse(enum.StrEnum):
    """Where a prompt's beginning came from."""

    COLD = "cold"
    """Nowhere: all of it was computed."""
    RAM = "ram"
    SSD = "ssd"
    """From SSD, at least in part."""


class CallMetrics:
    """Counts calls. Owned by the event loop."""

    def __init__(self, meter: PrometheusMeter) -> None:
        self._meter = meter

    def call_started(self, method: str) -> None:
        self._meter.add(CALLS_STARTED, 1, (method,))

    def wire_ended(self, record: WireRecord) -> None:
        labels = (record.method, record.code)
        self._meter.observe(CALL_DURATION, record.duration_s, labels)
        self._meter.observe(CALL_SENT, record.sent_bytes, labels)
        self._meter.observe(CALL_RECEIVED, record.received_bytes, labels)

    def call_ended(self, record: CallRecord) -> None:
        if record.code != "OK":
            self._meter.add(CALLS_REFUSED, 1, (record.method, record.code, record.reason))
        if record.started is not None:
            self._meter.observe(QUEUE_TIME, record.started.queue_s)
        if record.usage is not None:
            self._request_ended(record.usage)
        if record.operation is not None:
            self._operation_ended(record.operation, record)

    def _request_ended(self, usage: Usage) -> None:
        meter = self._meter
        meter.observe(PREFILL_TIME, usage.prefill_s)
        meter.observe(PROMPT_TOKENS, usage.prompt_token_count)
        meter.observe(OUTPUT_TOKENS, usage.output_token_count)
        if usage.cache.cached_token_count:
            meter.observe(RESTORE_TIME, usage.cache.restore_s)
        if usage.output_token_count:
            meter.observe(FIRST_TOKEN_BY_REUSE, usage.ttft_s, (_reuse_of(usage.cache),))

    def _operation_ended(self, operation: Operation, record: CallRecord) -> None:
        labels, error_type = (operation.value, PROVIDER, record.model_id), record.error_type
        usage = record.usage
        if usage is None or error_type:
            # A call that ended before it reached a model has no model to name.
            self._meter.observe(REQUEST_DURATION, record.duration_s, (*labels, error_type))
            return
        self._meter.observe(REQUEST_DURATION, usage.total_s, (*labels, ""))
        if usage.output_token_count:
            self._meter.observe(FIRST_TOKEN, usage.ttft_s, labels)
        if usage.output_token_count > 1:
            self._meter.observe(PER_TOKEN, usage.decode_s / (usage.output_token_count - 1), labels)


def _reuse_of(cache: CacheReport) -> PromptReuse:
    if not cache.cached_token_count:
        return PromptReuse.COLD
    return PromptReuse.SSD if cache.ssd_token_count else PromptReuse.RAM
