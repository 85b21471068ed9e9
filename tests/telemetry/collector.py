"""An OTLP collector on a loopback port that keeps what it is sent."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclasses.dataclass(frozen=True)
class Sent:
    """One span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    is_error: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans in the order they came."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.resource: dict[str, Any] = {}

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.resource = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans.extend(map(_sent, scope.spans))
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Give a collector and its endpoint."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _sent(span: Any) -> Sent:
    return Sent(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_plain(span.attributes),
        is_error=span.status.code == 2,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
