"""Stats poller: asks the engine at an interval, so that metrics and load reports never ask themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import EngineStats, KvEventStats, SampleRates, Snapshot
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.monitoring.stats_reader import StatsReader


class StatsPoller:
    """Keeps the latest snapshot. Sampling belongs to the event loop; any thread may read `latest`."""

    def __init__(
        self,
        *,
        engine: EnginePort,
        router: Router,
        stats: StatsReader,
        clock: Clock,
        interval_s: float,
        kv_events: Callable[[], KvEventStats] = KvEventStats,
    ) -> None:
        self._engine = engine
        self._router = router
        self._stats = stats
        self._clock = clock
        self._kv_events = kv_events
        self.interval_s = interval_s
        """Also how long the engine may take to answer."""
        self._latest = Snapshot(EngineState.LOADING, heartbeat_age_s=0.0, sample_time=clock.monotonic())

    @property
    def latest(self) -> Snapshot:
        """The last sample. A frozen value: reading it from another thread needs no lock."""
        return self._latest

    async def run(self) -> None:
        """Sample now and at every interval, until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(self.interval_s)

    async def sample(self) -> None:
        """Take one sample; an engine that does not answer in time leaves the last counters standing."""
        answer: tuple[EngineStats, CacheStats | None] | None = None
        if self._router.state is EngineState.READY:
            try:
                async with asyncio.timeout(self.interval_s):
                    answer = await self._stats.ask()
            except (TimeoutError, IcehouseError):
                answer = None
        self._latest = self._snapshot(answer)

    def _snapshot(self, answer: tuple[EngineStats, CacheStats | None] | None) -> Snapshot:
        last, now = self._latest, self._clock.monotonic()
        engine, cache = answer or (last.engine, last.cache)
        return Snapshot(
            state=self._router.state,
            heartbeat_age_s=max(0.0, now - self._engine.heartbeat_time),
            sample_time=now if answer is not None else last.sample_time,
            model=self._router.model.info if self._router.model is not None else None,
            engine=engine,
            cache=cache,
            tenants=self._stats.tenant_uses(),
            kv_events=self._kv_events(),
            rates=_rates(last, engine, now) if answer is not None else last.rates,
        )


def _rates(last: Snapshot, engine: EngineStats | None, now: float) -> SampleRates:
    elapsed_s = now - last.sample_time
    if last.engine is None or engine is None or elapsed_s <= 0:
        return SampleRates()
    return SampleRates(
        finished_per_s=(engine.finished_total - last.engine.finished_total) / elapsed_s,
        failed_per_s=(engine.failed_total - last.engine.failed_total) / elapsed_s,
        output_tokens_per_s=(engine.output_token_total - last.engine.output_token_total) / elapsed_s,
    )
