"""Counters from the inference thread, for CacheStats and WatchStats."""

from __future__ import annotations

from collections.abc import Callable

from icehouse.v1 import inference_service_pb2

from service.clock import Clock
from service.domain.cache_stats import CacheStats
from service.domain.stats import EngineStats
from service.rpc.caller import Caller, Role
from service.rpc.convert_stats import stats_response
from service.rpc.convert_tenants import tenant_stats_protos
from service.rpc.ports import EnginePort
from service.rpc.router import Router
from service.rpc.tenants import Tenants

Snapshot = tuple[EngineStats, CacheStats | None]


class StatsReader:
    """Asks the engine between two of its steps. Owned by the event loop."""

    def __init__(self, *, engine: EnginePort, router: Router, tenants: Tenants, clock: Clock) -> None:
        self._engine = engine
        self._router = router
        self._tenants = tenants
        self._clock = clock

    async def read(self, caller: Caller) -> inference_service_pb2.CacheStatsResponse:
        """Return the counters; raises Unavailable or EngineFailed when the engine does not run.

        What the whole house does tells one tenant of the others, so it is for operators.
        """
        self._router.require_model()
        engine, cache = await self._router.ask(self._send)
        response = stats_response(engine, cache, collect_time=self._clock.wall())
        response.tenants.extend(tenant_stats_protos(self._tenants, cache))
        return response if caller.role is Role.OPERATOR else _part_of(response, caller)

    def _send(self, reply: Callable[[Snapshot], None]) -> None:
        self._engine.request_stats(lambda engine, cache: reply((engine, cache)))


def _part_of(
    response: inference_service_pb2.CacheStatsResponse, caller: Caller
) -> inference_service_pb2.CacheStatsResponse:
    own = [stats for stats in response.tenants if stats.tenant == caller.tenant]
    return inference_service_pb2.CacheStatsResponse(collect_time=response.collect_time, tenants=own)
