"""KV event source: the task that follows the block log, for subscribers over gRPC and over ZeroMQ.

Owned by the event loop. It looks at the log at an interval, so that the inference thread wakes nobody; while
nobody has subscribed it does not even do that, and the log is off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from icehouse_server.clock import Clock
from icehouse_server.config import KvEventsConfig
from icehouse_server.domain.cache_commands import CacheAnswer
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.domain.stats import KvEventStats
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.engine_client.ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.channel import Subscription
from icehouse_server.rpc.kv_events.feed import EventFeed
from icehouse_server.rpc.kv_events.follower import LogFollower, Question
from icehouse_server.rpc.kv_events.mirror import BlockMirror

CONNECT_PREFIX = "connect:"
"""Of a ZeroMQ endpoint that is not listened at."""


class KvEventSource:
    """One for the whole server. Its task begins with the first subscriber, in that one's event loop."""

    def __init__(
        self,
        log: BlockLog,
        *,
        settings: KvEventsConfig,
        block_token_count: int,
        engine: EnginePort,
        router: Router,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self.left_ready = router.left_ready
        """Set when the engine serves no longer, and will not again."""
        self.interval_s = settings.interval_ms / 1000
        self._engine = engine
        self._router = router
        self.mirror = BlockMirror(block_token_count=block_token_count, block_limit=settings.block_limit)
        self.feed = EventFeed(self.mirror, replay_limit_bytes=settings.replay_bytes, clock=clock)
        self._follower = LogFollower(log, self.mirror, self.feed)
        self._task: asyncio.Task[None] | None = None

    def stats(self) -> KvEventStats:
        """Return its counters."""
        return KvEventStats(
            block_count=len(self.mirror),
            replay_bytes=self.feed.ring_bytes,
            event_total=self.feed.event_total,
            lost_total=self.feed.lost_total,
            untold_total=self.mirror.untold_total,
        )

    async def stop(self) -> None:
        """Follow it no more; subscribers are ended by whoever serves them."""
        if self._task is not None:
            await background.end(self._task)

    def subscribe(self, *, after_number: int, tenant: Tenant | None) -> Subscription:
        """Return what follows `after_number`, of one tenant or of all; raises EventsExpired."""
        self.follow(tenant)
        return self.feed.subscribe(after_number=after_number, tenant=tenant)

    def follow(self, tenant: Tenant | None) -> None:
        """Begin to follow the log, if nobody has asked for that before."""
        self._follower.begin(DEFAULT_TENANT if tenant is None else tenant)
        if self._task is None:
            self._task = background.start(self._run(), name="kv-events")

    async def _run(self) -> None:
        while self._follower.is_on:
            await self._follow()
            await asyncio.sleep(self.interval_s)

    async def _follow(self) -> None:
        """Publish what there is, and ask the engine for what is missing, until there is nothing to do."""
        while True:
            while self._follower.turn():
                await asyncio.sleep(0)
            question = self._follower.question()
            if question is None or not self._follower.answer(question, await self._ask(question)):
                return

    async def _ask(self, question: Question) -> CacheAnswer | IcehouseError:
        def send(reply: Callable[[CacheAnswer | IcehouseError], None]) -> None:
            self._engine.submit_command(question, reply)

        try:
            return await self._router.ask(send)
        except IcehouseError as error:
            return error
