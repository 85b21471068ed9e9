"""Stats reader: counters from the inference thread, for CacheStats and WatchStats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from icehouse.v1 import inference_service_pb2

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.stats import EngineStats, ServerStats, TenantUse
from icehouse_server.rpc.access.caller import Caller, Role
from icehouse_server.rpc.access.tenants import Tenants
from icehouse_server.rpc.calls.slow_requests import SlowRequests
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.messages.stats import stats_response, tenant_stats_protos

Counters = tuple[EngineStats, CacheStats | None]


class StatsReader:
    """Asks the engine between two of its steps. Owned by the event loop."""

    def __init__(
        self, *, engine: EnginePort, router: Router, tenants: Tenants, slow: SlowRequests, clock: Clock
    ) -> None:
        self._slow = slow
        self._engine = engine
        self._router = router
        self._tenants = tenants
        self._clock = clock

    async def read(self, caller: Caller) -> inference_service_pb2.CacheStatsResponse:
        """Return the counters; raises Unavailable or EngineFailed when the engine does not run.

        What the whole server does tells one tenant of the others, so it is for operators.
        """
        engine, cache = await self.ask()
        is_operator = caller.role is Role.OPERATOR
        stats = ServerStats(
            collect_time=self._clock.wall(),
            engine=engine if is_operator else None,
            cache=cache if is_operator else None,
            slowest_requests=self._slow.slowest(tenant=None if is_operator else caller.tenant),
        )
        response = stats_response(stats)
        tenants = tenant_stats_protos(self._tenants, cache)
        response.tenants.extend(each for each in tenants if is_operator or each.tenant == caller.tenant)
        return response

    def tenant_uses(self) -> tuple[TenantUse, ...]:
        """Return what each tenant runs and has used."""
        return tuple(dataclasses.replace(account.use) for account in self._tenants)

    async def ask(self) -> Counters:
        """Return the counters as the engine tells them; raises as `read` does."""
        self._router.require_model()
        return await self._router.ask(self._send)

    def _send(self, reply: Callable[[Counters], None]) -> None:
        self._engine.request_stats(lambda engine, cache: reply((engine, cache)))
