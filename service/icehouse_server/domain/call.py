"""Call record for metrics, traces and the access log. It holds no prompt or output text."""

from __future__ import annotations

import dataclasses
import enum

from icehouse_server.domain.events import Started, Usage
from icehouse_server.domain.ids import RequestId


class PeerKind(enum.StrEnum):
    """How a caller reached the server. Addresses are not recorded, since they identify people."""

    UNIX = "unix"
    LOOPBACK = "loopback"
    NETWORK = "network"
    UNKNOWN = "unknown"


PROVIDER = "icehouse"
"""`gen_ai.provider.name` in OpenTelemetry's conventions."""


class Operation(enum.StrEnum):
    """What a request asks of a model, named as in OpenTelemetry's conventions for generative AI."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    """Not one of the conventions' names, but they allow others."""


@dataclasses.dataclass(slots=True)
class CallRecord:
    """What one call was, what it cost and how it ended. Durations in seconds.

    The call fills it in while it runs; watchers get it at the end and change nothing.
    """

    method: str
    """Full name, "icehouse.v1.InferenceService/Generate"."""
    peer: PeerKind
    start_time: float
    """`Clock.wall` when the call reached the edge."""
    request_id: str
    code: str = ""
    """Canonical gRPC status code, "OK" included."""
    reason: str = ""
    """Why it failed, as in `errors.Reason`; empty if it did not."""
    tenant: str = ""
    model_id: str = ""
    """Empty if the call never reached a model."""
    duration_s: float = 0.0
    tokenize_s: float = 0.0
    prompt_token_count: int = 0
    started: Started | None = None
    """None if the request never left the queue."""
    usage: Usage | None = None
    """None unless the request ran to its end."""
    traceparent: str = ""
    tracestate: str = ""
    """The caller's W3C trace context; empty if it sent none."""
    session_id: str = ""
    """The conversation that the call is a turn of, from the metadata or the request; empty if unknown."""
    agent_id: str = ""
    """The agent of the session that calls, from the metadata; empty if unknown."""
    parent_session_id: str = ""
    """The session that started this one, from the metadata or the request; empty if unknown."""
    operation: Operation | None = None
    """None for calls that use no model, such as those for statistics or the cache."""

    @property
    def error_type(self) -> str:
        """Why it failed, as one of few values; empty if it did not."""
        return "" if self.code == "OK" else self.reason or self.code


@dataclasses.dataclass(frozen=True, slots=True)
class WireRecord:
    """One call of any service on the wire, including health and reflection."""

    method: str
    code: str
    duration_s: float
    sent_bytes: int
    """Bytes of all messages, without framing."""
    received_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SpillRecord:
    """A block that was written to SSD because a request needed its space in RAM."""

    request_id: RequestId
    start_time: float
    """`Clock.wall` when writing began."""
    duration_s: float
    """Until its row in the manifest was committed."""
    token_count: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class SpanNames:
    """Identifies the span of a call."""

    trace_id: str
    """32 hex digits."""
    traceresponse: str
    """The W3C `traceresponse` header for the caller."""
