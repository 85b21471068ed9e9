"""Counters from the inference thread, for CacheStats and WatchStats."""

from __future__ import annotations

from collections.abc import Callable

from icehouse.v1 import inference_service_pb2

from service.clock import Clock
from service.domain.cache_stats import CacheStats
from service.domain.stats import EngineStats
from service.rpc.convert_stats import stats_response
from service.rpc.ports import EnginePort
from service.rpc.router import Router

Snapshot = tuple[EngineStats, CacheStats | None]


class StatsReader:
    """Asks the engine between two of its steps. Owned by the event loop."""

    def __init__(self, *, engine: EnginePort, router: Router, clock: Clock) -> None:
        self._engine = engine
        self._router = router
        self._clock = clock

    async def read(self) -> inference_service_pb2.CacheStatsResponse:
        """Return the counters; raises Unavailable or EngineFailed when the engine does not run."""
        self._router.require_model()
        engine, cache = await self._router.ask(self._send)
        return stats_response(engine, cache, collect_time=self._clock.wall())

    def _send(self, reply: Callable[[Snapshot], None]) -> None:
        self._engine.request_stats(lambda engine, cache: reply((engine, cache)))
