"""Load report (ORCA): how busy this server is, in a trailer that balancers read (gRPC proposal A51)."""

from __future__ import annotations

from collections.abc import Callable

from icehouse.v1 import load_report_pb2

from icehouse_server.domain.stats import Snapshot

TRAILER_KEY = "endpoint-load-metrics-bin"


class LoadReport:
    """Serializes each snapshot once, whatever the number of calls that carry it. Event loop."""

    def __init__(self, latest: Callable[[], Snapshot]) -> None:
        self._latest = latest
        self._reported: Snapshot | None = None
        self._data = b""

    def trailer(self) -> tuple[str, bytes] | None:
        """Return the trailer; None before the engine has told its first counters."""
        snapshot = self._latest()
        if snapshot.engine is None:
            return None
        if snapshot is not self._reported:
            self._reported = snapshot
            self._data = report_of(snapshot).SerializeToString(deterministic=True)
        return TRAILER_KEY, self._data


def report_of(snapshot: Snapshot) -> load_report_pb2.LoadReport:
    """Return the report of a snapshot with counters."""
    engine, cache = snapshot.engine, snapshot.cache
    assert engine is not None, "no counters yet"
    running_count = engine.running_count
    memory_limit_bytes = engine.memory_limit_bytes
    named = {
        "icehouse.waiting": float(engine.waiting_count),
        "icehouse.decoding": float(engine.decoding_count),
    }
    if cache is not None:
        lookups = cache.lookups
        reused = lookups.ram_token_total + lookups.ssd_token_total
        named["icehouse.hit_ratio"] = reused / max(1, reused + lookups.miss_token_total)
    return load_report_pb2.LoadReport(
        mem_utilization=engine.active_memory_bytes / memory_limit_bytes if memory_limit_bytes else 0.0,
        rps_fractional=snapshot.rates.finished_per_s,
        eps=snapshot.rates.failed_per_s,
        named_metrics=named,
        application_utilization=(running_count + engine.waiting_count) / max(1, engine.decoding_limit),
    )
