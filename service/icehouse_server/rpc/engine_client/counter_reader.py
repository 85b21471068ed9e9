"""Counter reader: asks one engine for its counters between two steps, once for all who want them at a time.
Owned by the event loop."""

from __future__ import annotations

import asyncio
import math

from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.stats import EngineStats
from icehouse_server.rpc.access.shares import RateLimit
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router

Counters = tuple[EngineStats, CacheStats | None]

PATIENCE_S = 1.0
"""How long an answer of the engine may take: nobody waits for ever for one that is lost."""
_RATE_PER_S = 20.0
_BURST_COUNT = 64


class CounterReader:
    """All who come while the engine is being asked share its next answer, and the rate is limited: counting
    takes longer the more blocks there are, on threads that everybody waits for."""

    def __init__(self, *, engine: EnginePort, router: Router) -> None:
        self._engine = engine
        self._router = router
        self._asking: asyncio.Future[Counters] | None = None
        self._next: asyncio.Future[Counters] | None = None
        self._rate_limit = RateLimit(rate_per_s=_RATE_PER_S, burst_count=_BURST_COUNT)

    async def ask(self) -> Counters:
        """Return the engine's next counters; raises Unavailable or EngineFailed if it does not run."""
        self._router.require_model()
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask_after(self._asking))
            self._next.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._next)

    async def _ask_after(self, before: asyncio.Future[Counters] | None) -> Counters:
        if before is not None:
            await asyncio.wait((before,), timeout=PATIENCE_S)
        # A burst at once, then only so many a second.
        now = asyncio.get_running_loop().time()
        if delay_s := self._rate_limit.delay_s("", now=now, longest_s=math.inf):
            await asyncio.sleep(delay_s)
        self._asking, self._next = self._next, None
        send = self._engine.request_stats
        return await self._router.ask(lambda reply: send(lambda engine, cache: reply((engine, cache))))


def _retrieve_error(asked: asyncio.Future[Counters]) -> None:
    """Retrieve its error, even if everybody who asked has left."""
    if not asked.cancelled():
        asked.exception()
