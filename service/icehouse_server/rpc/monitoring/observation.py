"""Observation: who watches the calls of one server, and the stats poller while it serves."""

from __future__ import annotations

import asyncio

from icehouse_server.clock import Clock
from icehouse_server.rpc.access.tenants import Tenants
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.calls.access_log import AccessLog
from icehouse_server.rpc.calls.slow_requests import SlowRequests
from icehouse_server.rpc.calls.watchers import Telemetry, Watchers
from icehouse_server.rpc.calls.wire import WireInterceptor
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.monitoring.load_report import LoadReport
from icehouse_server.rpc.monitoring.stats_poller import StatsPoller
from icehouse_server.rpc.monitoring.stats_reader import StatsReader
from icehouse_server.rpc.monitoring.status import StatusReader

_UNUSED_INTERVAL_S = 1.0
"""For a sampler that nobody starts."""


class Observation:
    """Owned by the event loop."""

    def __init__(
        self, telemetry: Telemetry, *, engine: EnginePort, router: Router, tenants: Tenants, clock: Clock
    ) -> None:
        self._has_samples = telemetry.sample_interval_s is not None
        self._task: asyncio.Task[None] | None = None
        slow = SlowRequests(clock)
        self.stats = StatsReader(engine=engine, router=router, tenants=tenants, slow=slow, clock=clock)
        self.poller = StatsPoller(
            engine=engine,
            router=router,
            stats=self.stats,
            clock=clock,
            interval_s=telemetry.sample_interval_s or _UNUSED_INTERVAL_S,
            kv_events=telemetry.kv_events,
        )
        self.status = StatusReader(engine=engine, router=router, poller=self.poller, slow=slow, clock=clock)
        self.watchers = Watchers(
            calls=(slow, *telemetry.calls),
            tracer=telemetry.tracer,
            load_trailer=LoadReport(lambda: self.poller.latest).trailer
            if telemetry.has_load_report
            else None,
            access_log=AccessLog(clock) if telemetry.has_access_log else None,
        )
        self.interceptor = WireInterceptor(telemetry.wire, clock)

    def start(self) -> None:
        """Begin to sample, if anybody wants samples."""
        if self._has_samples:
            self._task = background.start(self.poller.run(), name="sampler")

    async def stop(self) -> None:
        """Sample no more."""
        if self._task is not None:
            await background.end(self._task)
            self._task = None
