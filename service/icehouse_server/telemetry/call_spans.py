"""OpenTelemetry spans of ended calls and of the spills that they caused, sent over OTLP.

Spans are made once their facts are known: a call's on the event loop when it ends, a spill's on the storage
thread when its block is committed. The inference thread only reports plain numbers. The SDK's own thread
sends, from a bounded queue that drops what it cannot hold.
"""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import logging
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from icehouse_server.domain.call import PROVIDER, CallRecord, SpanNames, SpillRecord
from icehouse_server.domain.ids import RequestId, Tenant
from icehouse_server.domain.request import request_id_of

Attribute = str | int | float

SERVICE_NAME = "icehouse"

_EXPORT_TIMEOUT_S = 5.0
"""For one batch; a collector that does not answer delays the stop by at most this."""

_CALL_COUNT_LIMIT = 4096
"""Most ended calls that later spills can still find."""

_SPILL_COUNT_LIMIT = 4096
"""Most spills that are kept for calls that have not ended."""

# The codes that OpenTelemetry's conventions for gRPC servers call an error; others are the caller's fault.
_SERVER_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}

_propagator = TraceContextTextMapPropagator()


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to a collector; https:// means TLS, everything else none.

    A collector on this machine is reached directly, whatever proxy the environment names.
    """
    options: Any = (("grpc.enable_http_proxy", 0),) if _is_local(endpoint) else None
    return OTLPSpanExporter(
        endpoint,
        insecure=not endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
        channel_options=options,
    )


def _is_local(endpoint: str) -> bool:
    try:
        host = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class CallSpans:
    """Makes the spans. The event loop calls `trace`, the storage thread `spilled`."""

    def __init__(self, exporter: SpanExporter, *, sample_ratio: float, version: str) -> None:
        # The SDK would log every batch that a missing collector did not take.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": SERVICE_NAME, "service.version": version}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("icehouse", version)
        self._joins = _Joins()

    def trace(self, record: CallRecord) -> SpanNames | None:
        """Record an ended call with its stages and its spills so far; return None if it is not sampled."""
        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        span = self._tracer.start_span(
            record.method,
            _propagator.extract(carrier, Context()),
            SpanKind.SERVER,
            attributes=_attributes_of(record),
            start_time=_ns(record.start_time),
        )
        if record.code in _SERVER_ERRORS:
            span.set_status(StatusCode.ERROR)
        parent = trace.set_span_in_context(span, Context())
        if span.is_recording():
            for stage in stages_of(record):
                child = self._tracer.start_span(
                    stage.name,
                    parent,
                    attributes=stage.attributes,
                    start_time=_ns(record.start_time + stage.start_s),
                )
                child.end(_ns(record.start_time + stage.end_s))
        for spill in self._joins.call_ended(request_id_of(record.request_id, Tenant(record.tenant)), span):
            self._spill_span(spill, span)
        span.end(_ns(record.start_time + record.duration_s))
        return _names_of(span) if span.get_span_context().trace_flags.sampled else None

    def spilled(self, record: SpillRecord) -> None:
        """Record the spill of a block as a child of the call that caused it."""
        span = self._joins.spilled(record)
        if span is not None:
            self._spill_span(record, span)

    def stop(self) -> None:
        """Send the spans that are left, for a few seconds at most."""
        self._provider.shutdown()

    def _spill_span(self, record: SpillRecord, parent: Span) -> None:
        span = self._tracer.start_span(
            "spill",
            trace.set_span_in_context(parent, Context()),
            attributes={"icehouse.tokens": record.token_count, "icehouse.size": record.size_bytes},
            start_time=_ns(record.start_time),
        )
        span.end(_ns(record.start_time + record.duration_s))


class _Joins:
    """Matches spills with their calls, whichever ends first. Any thread; bounded.

    If a request id is used again while blocks of its first use are still being written, both count as one
    call. The lock is held for a few dict operations; nothing waits while holding it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: collections.OrderedDict[RequestId, Span] = collections.OrderedDict()
        self._early: collections.deque[SpillRecord] = collections.deque(maxlen=_SPILL_COUNT_LIMIT)

    def call_ended(self, request_id: RequestId, span: Span) -> list[SpillRecord]:
        """Remember the call's span; return the spills that were reported before it ended."""
        with self._lock:
            self._ended[request_id] = span
            if len(self._ended) > _CALL_COUNT_LIMIT:
                self._ended.popitem(last=False)
            if not self._early:
                return []
            found = [spill for spill in self._early if spill.request_id == request_id]
            if found:
                others = [spill for spill in self._early if spill.request_id != request_id]
                self._early = collections.deque(others, maxlen=_SPILL_COUNT_LIMIT)
            return found

    def spilled(self, record: SpillRecord) -> Span | None:
        """Return the span of the spill's call if it has ended; keep the spill for it if not."""
        with self._lock:
            span = self._ended.get(record.request_id)
            if span is None:
                self._early.append(record)
            return span


@dataclasses.dataclass(frozen=True, slots=True)
class CallStage:
    """One stage of a call, in seconds since the call reached the edge."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = dataclasses.field(default_factory=dict)


def stages_of(record: CallRecord) -> Iterator[CallStage]:
    """Yield the stages that the call reached, in order.

    Only reported stages: a request that was cancelled in prefill has no prefill stage, since its length is
    known only for requests that ran to their end.
    """
    if record.tokenize_s > 0:
        yield CallStage(
            "tokenize", 0.0, record.tokenize_s, {"icehouse.prompt.tokens": record.prompt_token_count}
        )
    started = record.started
    if started is None:
        return
    yield CallStage("queue", min(record.tokenize_s, started.queue_s), started.queue_s)
    # Only the end shows for certain what a restore achieved.
    cache = record.usage.cache if record.usage is not None else started.cache
    restored_s = started.queue_s + cache.restore_s
    if cache.restore_s > 0:
        yield CallStage(
            "restore",
            started.queue_s,
            restored_s,
            {
                "icehouse.ram.tokens": cache.ram_token_count,
                "icehouse.ssd.tokens": cache.ssd_token_count,
                "icehouse.reuse.limit": cache.limit.name.lower(),
            },
        )
    usage = record.usage
    if usage is None:
        return
    computed_count = usage.prompt_token_count - usage.cache.cached_token_count
    yield CallStage("prefill", restored_s, restored_s + usage.prefill_s, {"icehouse.tokens": computed_count})
    if usage.output_token_count:
        yield CallStage(
            "decode",
            usage.ttft_s,
            usage.ttft_s + usage.decode_s,
            {"icehouse.tokens": usage.output_token_count},
        )


def _names_of(span: Span) -> SpanNames:
    context = span.get_span_context()
    trace_id, span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return SpanNames(trace_id, f"00-{trace_id}-{span_id}-{context.trace_flags:02x}")


def _attributes_of(record: CallRecord) -> dict[str, Attribute]:
    operation, started, usage = record.operation, record.started, record.usage
    attributes: dict[str, Attribute | None] = {
        "rpc.system.name": "grpc",
        "rpc.method": record.method,
        "rpc.response.status_code": record.code,
        "icehouse.request.id": record.request_id,
        "icehouse.peer": record.peer.value,
        "error.type": record.error_type or None,
        "icehouse.tenant": record.tenant or None,
        "gen_ai.conversation.id": record.session_id or None,
        "gen_ai.operation.name": operation.value if operation else None,
        "gen_ai.provider.name": PROVIDER if operation else None,
        "gen_ai.request.model": record.model_id or None,
        "gen_ai.usage.input_tokens": record.prompt_token_count or None,
        "gen_ai.usage.cache_read.input_tokens": started.cache.cached_token_count if started else None,
        "gen_ai.usage.output_tokens": usage.output_token_count if usage else None,
        "gen_ai.response.time_to_first_chunk": usage.ttft_s if usage else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
