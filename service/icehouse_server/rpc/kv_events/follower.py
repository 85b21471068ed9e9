"""Log follower: from the block log into the feed, and the questions to the engine that this takes.

Owned by the event loop; plain code, one turn at a time, so that tests turn it without a loop. A turn takes a
bounded number of changes, and at most one question is open, so that the inference thread never works for
subscribers longer than for one command.
"""

from __future__ import annotations

from icehouse_server.domain.cache_commands import (
    BeginListing,
    BlockTokens,
    CacheAnswer,
    ContinueListing,
    Listing,
    ReadTokens,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, Tenant
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.errors import IcehouseError, Overloaded
from icehouse_server.rpc.kv_events.feed import EventFeed
from icehouse_server.rpc.kv_events.mirror import BlockMirror

_TURN_LIMIT = 512
"""Changes taken in one turn: a few milliseconds of the event loop."""
_READ_LIMIT = 32
"""Files whose headers are read for one question."""

Question = BeginListing | ContinueListing | ReadTokens


class LogFollower:
    """Brings mirror and feed up to the log. Off until `begin`."""

    def __init__(self, log: BlockLog, mirror: BlockMirror, feed: EventFeed) -> None:
        self._log = log
        self._mirror = mirror
        self._feed = feed
        self._tenants = {DEFAULT_TENANT}
        """Whose roots the engine is to know, before they ask for anything."""
        self._has_begun = False
        self._is_given_up = False
        self._is_listing_due = False
        self._left_count = 0
        self._reading: tuple[BlockHash, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether anybody wants events, and there is a cache to tell of."""
        return self._has_begun and not self._is_given_up

    def begin(self, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Somebody listens, to this tenant's blocks among others."""
        self._is_listing_due |= not self._has_begun or tenant not in self._tenants
        self._has_begun = True
        self._tenants.add(tenant)

    def turn(self) -> bool:
        """Publish what the log has told; False when that was all."""
        changes = self._log.take(limit=_TURN_LIMIT)
        if changes:
            self._feed.publish(self._mirror.apply(changes))
        return bool(len(self._log))

    def question(self) -> Question | None:
        """Return what the engine is to be asked now; it must be answered before the next one."""
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
        """Take the answer in; False when it is better to wait before the next question."""
        if isinstance(answer, Listing):
            self._left_count = answer.left_count
        elif isinstance(answer, BlockTokens):
            self._feed.publish(self._mirror.learn(answer.blocks))
        elif isinstance(answer, Overloaded):
            self._is_listing_due |= isinstance(question, BeginListing)
            self._mirror.put_back(self._reading)
            self._reading = ()
            return False
        else:
            # No cache, or an engine that ends: nothing will ever be told.
            self._is_given_up = True
        return True
