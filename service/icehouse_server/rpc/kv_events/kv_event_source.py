"""KV event source: the task that follows the block log, for subscribers over gRPC and over ZeroMQ.

Owned by the event loop. It polls the log, so the inference thread wakes nobody. Until somebody subscribes, it
does not poll and the log is off.
"""

from __future__ import annotations

import asyncio
import functools

from icehouse_server.clock import Clock
from icehouse_server.config import KvEventsConfig
from icehouse_server.domain.cache_commands import (
    BeginListing,
    BlockTokens,
    CacheAnswer,
    ContinueListing,
    ExportListing,
    ReadTokens,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, Tenant
from icehouse_server.domain.stats import KvEventStats
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.errors import IcehouseError, Overloaded
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.engine_client.engine_ports import EnginePort
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.block_mirror import BlockMirror
from icehouse_server.rpc.kv_events.event_feed import EventFeed

CONNECT_PREFIX = "connect:"
"""Prefix of a ZeroMQ endpoint to connect to instead of listening on."""


class KvEventSource:
    """One for each model. Its task starts with the first subscriber, on that subscriber's event loop."""

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
        """Set when the engine has stopped serving for good."""
        self.interval_s = settings.interval_ms / 1000
        self._engine = engine
        self._router = router
        self.mirror = BlockMirror(block_token_count=block_token_count, block_limit=settings.block_limit)
        self.feed = EventFeed(self.mirror, replay_limit_bytes=settings.replay_bytes, clock=clock)
        self._follower = LogFollower(log, self.mirror, self.feed)
        self._task: asyncio.Task[None] | None = None

    def stats(self) -> KvEventStats:
        return KvEventStats(
            block_count=len(self.mirror),
            replay_bytes=self.feed.ring_bytes,
            event_total=self.feed.event_total,
            lost_total=self.feed.lost_total,
            untold_total=self.mirror.unpublished_total,
        )

    async def stop(self) -> None:
        """Stop following the log; the code that serves subscribers ends their streams."""
        if self._task is not None:
            await background.end(self._task)

    def follow(self, tenant: Tenant) -> None:
        """Put a tenant's blocks into the feed; the default tenant's are always in it."""
        self._follower.begin(tenant)
        if self._task is None:
            self._task = background.start(self._run(), name="kv-events")

    async def _run(self) -> None:
        while self._follower.is_on:
            await self._follow()
            await asyncio.sleep(self.interval_s)

    async def _follow(self) -> None:
        """Publish the log's changes and ask the engine for what is missing, until nothing is left to do."""
        while True:
            while self._follower.turn():
                await asyncio.sleep(0)
            question = self._follower.question()
            if question is None or not self._follower.answer(question, await self._ask(question)):
                return

    async def _ask(self, question: Question) -> CacheAnswer | IcehouseError:
        try:
            return await self._router.ask(functools.partial(self._engine.submit_command, question))
        except IcehouseError as error:
            return error


_TURN_LIMIT = 512
"""Most changes applied in one turn: a few milliseconds of the event loop."""
_READ_LIMIT = 32
"""Most files whose headers are read for one question."""

Question = BeginListing | ContinueListing | ReadTokens


class LogFollower:
    """Brings mirror and feed up to date with the log. Off until `begin`.

    Plain code that runs one turn at a time, so that tests need no event loop. A turn takes a bounded number
    of changes, and at most one question is open, so the inference thread never works for subscribers longer
    than one command takes.
    """

    def __init__(self, log: BlockLog, mirror: BlockMirror, feed: EventFeed) -> None:
        self._log = log
        self._mirror = mirror
        self._feed = feed
        self._tenants = {DEFAULT_TENANT}
        """Tenants whose roots the engine must report."""
        self._has_begun = False
        self._is_given_up = False
        self._is_listing_due = False
        self._left_count = 0
        self._reading: tuple[BlockHash, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether anybody wants events and there is a cache."""
        return self._has_begun and not self._is_given_up

    def begin(self, tenant: Tenant = DEFAULT_TENANT) -> None:
        self._is_listing_due |= not self._has_begun or tenant not in self._tenants
        self._has_begun = True
        self._tenants.add(tenant)

    def turn(self) -> bool:
        """Publish the next changes of the log; return False if those were all."""
        changes = self._log.take(limit=_TURN_LIMIT)
        if changes:
            self._feed.publish(self._mirror.apply(changes))
        return bool(len(self._log))

    def question(self) -> Question | None:
        """Return the next question to the engine; `answer` must be called before the next one."""
        if not self.is_on or len(self._log):
            return None
        if self._is_listing_due or not self._log.is_on:
            self._is_listing_due = False
            return BeginListing(tuple(self._tenants))
        if self._left_count:
            return ContinueListing()
        self._reading = self._mirror.take_unread(limit=_READ_LIMIT)
        return ReadTokens(self._reading) if self._reading else None

    def answer(self, question: Question, answer: CacheAnswer | IcehouseError) -> bool:
        """Apply the answer; return False if it is better to wait before the next question."""
        if isinstance(answer, ExportListing):
            self._left_count = answer.left_count
        elif isinstance(answer, BlockTokens):
            self._feed.publish(self._mirror.learn(answer.blocks))
        elif isinstance(answer, Overloaded):
            self._is_listing_due |= isinstance(question, BeginListing)
            self._mirror.put_back(self._reading)
            self._reading = ()
            return False
        else:
            # No cache, or the engine is ending: there will never be events.
            self._is_given_up = True
        return True
