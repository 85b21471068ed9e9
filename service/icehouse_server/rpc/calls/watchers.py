"""Watchers of calls: the seams that metrics, traces and balancers fill. Event loop only; none may block.

What the edge needs of telemetry, given to it by whoever composes the house.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from icehouse_server.domain.call import CallRecord, SpanNames
from icehouse_server.domain.stats import KvEventStats
from icehouse_server.rpc.calls.access_log import AccessLog
from icehouse_server.rpc.calls.wire import WireWatcher


class CallWatcher(Protocol):
    """Is told of every ended call of our own services."""

    def call_ended(self, record: CallRecord) -> None: ...


class Tracer(Protocol):
    """Makes spans of ended calls."""

    def trace(self, record: CallRecord) -> SpanNames | None:
        """Record a call's spans; None when its trace is not kept."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Watchers:
    """All of them; empty ones cost nothing."""

    calls: tuple[CallWatcher, ...] = ()
    tracer: Tracer | None = None
    load_trailer: Callable[[], tuple[str, bytes] | None] | None = None
    """Trailing metadata for every call: how busy the server is."""
    access_log: AccessLog | None = None

    def see_out(self, record: CallRecord) -> tuple[tuple[str, str | bytes], ...]:
        """Tell everyone of an ended call; return the trailing metadata that its caller gets."""
        trailers: list[tuple[str, str | bytes]] = []
        names = self.tracer.trace(record) if self.tracer is not None else None
        if names is not None:
            trailers.append(("traceresponse", names.traceresponse))
        if self.load_trailer is not None and (trailer := self.load_trailer()) is not None:
            trailers.append(trailer)
        if self.access_log is not None:
            self.access_log.write(record, trace_id=names.trace_id if names is not None else "")
        for watcher in self.calls:
            watcher.call_ended(record)
        return tuple(trailers)


@dataclasses.dataclass(frozen=True, slots=True)
class Telemetry:
    """Which watchers the server has. The default is what a test wants: the access log and nothing else."""

    wire: tuple[WireWatcher, ...] = ()
    calls: tuple[CallWatcher, ...] = ()
    tracer: Tracer | None = None
    has_load_report: bool = False
    has_access_log: bool = True
    sample_interval_s: float | None = None
    """None: nothing wants samples."""
    kv_events: Callable[[], KvEventStats] = KvEventStats
    """Asked for each sample."""
