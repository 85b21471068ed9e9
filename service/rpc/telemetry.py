"""What the edge needs of telemetry, given to it by whoever composes the house."""

from __future__ import annotations

import dataclasses

from service.rpc.watchers import CallWatcher, Tracer
from service.rpc.wire import WireWatcher


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
