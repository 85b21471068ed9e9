"""Stats reader: counters from the inference thread, for CacheStats and WatchStats."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable

from icehouse.v1 import cache_service_pb2, inference_service_pb2

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.stats import EngineStats, ServerStats, TenantUse
from icehouse_server.rpc.access.caller import Caller, Role
from icehouse_server.rpc.access.tenants import QueueCounts, Tenants
from icehouse_server.rpc.calls.watchers import SlowRequests
from icehouse_server.rpc.calls.wire import Encoded
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.messages.stats import stats_response, tenant_stats_protos

Counters = tuple[EngineStats, CacheStats | None]

_RATE_PER_S = 20.0
_BURST_COUNT = 64
_PATIENCE_S = 1.0
"""How long an answer may keep the next question waiting: one that is lost keeps nobody for ever."""


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
        self._asking: asyncio.Future[Counters] | None = None
        self._next: asyncio.Future[Counters] | None = None
        self._due_time = 0.0
        self._latest: Counters | None = None
        self._told: dict[Tenant | None, _Told] = {}
        """What the latest counters are to each tenant that asked, None for who hears of all."""

    async def read(self, caller: Caller) -> inference_service_pb2.CacheStatsResponse:
        """Return the counters; raises Unavailable or EngineFailed when the engine does not run.

        What the whole server does tells one tenant of the others, so it is for operators.
        """
        return (await self._read(caller)).stats

    async def watched(self, caller: Caller) -> Encoded:
        """Return them as WatchStats tells them, in one message for all who are told the same; raises as
        `read` does."""
        return (await self._read(caller)).watched

    async def _read(self, caller: Caller) -> _Told:
        counters = await self.ask()
        if counters is not self._latest:
            self._latest, self._told = counters, {}
        told = self._told.get(caller.scope)
        if told is None:
            told = self._told[caller.scope] = _Told(self._response(counters, caller))
        return told

    def _response(self, counters: Counters, caller: Caller) -> inference_service_pb2.CacheStatsResponse:
        engine, cache = counters
        is_operator = caller.role is Role.OPERATOR
        stats = ServerStats(
            collect_time=self._clock.wall(),
            engine=engine if is_operator else None,
            cache=cache if is_operator else None,
            slowest_requests=self._slow.slowest(tenant=None if is_operator else caller.tenant),
        )
        response = stats_response(stats)
        accounts = [each for each in self._tenants if is_operator or each.use.tenant == caller.tenant]
        response.tenants.extend(tenant_stats_protos(self._tenants, accounts, cache))
        return response

    def tenant_uses(self) -> tuple[TenantUse, ...]:
        """Return what each tenant runs and has used."""
        return tuple(dataclasses.replace(account.use) for account in self._tenants)

    def tenant_use(self, tenant: Tenant) -> TenantUse:
        """Return what one tenant runs and has used, whoever else there is."""
        return self._tenants.use_of(tenant)

    @property
    def counts(self) -> QueueCounts:
        """Requests of all tenants now; kept, not counted."""
        return self._tenants.counts

    async def ask(self) -> Counters:
        """Return the counters as the engine tells them from now on; raises as `read` does.

        All who come while the engine is being asked get its next answer together, and it is asked so often
        only: counting takes longer the more blocks there are, on the threads that everybody waits for.
        """
        self._router.require_model()
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask_after(self._asking))
            self._next.add_done_callback(_noted)
        return await asyncio.shield(self._next)

    async def _ask_after(self, before: asyncio.Future[Counters] | None) -> Counters:
        if before is not None:
            await asyncio.wait((before,), timeout=_PATIENCE_S)
        await self._pause()
        self._asking, self._next = self._next, None
        return await self._router.ask(self._send)

    async def _pause(self) -> None:
        """Wait until the engine may be asked again: a few times at once, then so often in a second."""
        now = asyncio.get_running_loop().time()
        self._due_time = max(self._due_time, now - _BURST_COUNT / _RATE_PER_S) + 1 / _RATE_PER_S
        if self._due_time > now:
            await asyncio.sleep(self._due_time - now)

    def _send(self, reply: Callable[[Counters], None]) -> None:
        self._engine.request_stats(lambda engine, cache: reply((engine, cache)))


class _Told:
    """What all who may hear the same are told of the same counters."""

    def __init__(self, stats: inference_service_pb2.CacheStatsResponse) -> None:
        self.stats = stats

    @functools.cached_property
    def watched(self) -> Encoded:
        """A WatchStatsResponse."""
        return Encoded(cache_service_pb2.WatchStatsResponse(stats=self.stats).SerializeToString())


def _noted(asked: asyncio.Future[Counters]) -> None:
    """Look at how it ended, even if everybody who asked has left."""
    if not asked.cancelled():
        asked.exception()
