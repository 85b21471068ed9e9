"""The follower asks for what it lacks, one question at a time, and never more than it needs."""

from __future__ import annotations

from icehouse_server.domain.cache_commands import (
    BeginListing,
    BlockTokens,
    ContinueListing,
    ExportListing,
    KnownTokens,
    ReadTokens,
    Tier,
)
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.block_log import BlockLog, Came, ListingEnded
from icehouse_server.errors import IcehouseError, Overloaded, Reason
from icehouse_server.rpc.kv_events.block_mirror import BlockMirror
from icehouse_server.rpc.kv_events.event_feed import EventFeed
from icehouse_server.rpc.kv_events.kv_event_source import LogFollower

from tests.fixtures.engine import FakeClock
from tests.fixtures.kv_events import Gateway

ROOT = BlockHash(b"r" * 32)


class Follower:
    """A follower with everything around it; `log` is noted in as the engine would."""

    def __init__(self, *, log_limit: int = 100) -> None:
        self.log = BlockLog(limit=log_limit)
        self.log.add_roots({ROOT: CacheScope()})
        self.mirror = BlockMirror(block_token_count=2, block_limit=100)
        self.feed = EventFeed(self.mirror, replay_limit_bytes=1 << 20, clock=FakeClock())
        self.made = LogFollower(self.log, self.mirror, self.feed)
        self.gateway = Gateway(self.feed)

    def came(self, number: int, *, has_tokens: bool = True) -> BlockHash:
        name = BlockHash(bytes([number]) * 32)
        tokens = (number, number) if has_tokens else None
        self.log.note(Came(Tier.SSD, name, ROOT, True, 2, tokens))
        return name

    def publish(self) -> int:
        while self.made.turn():
            pass
        self.gateway.read(limit=None)
        return len(self.gateway.known)


def test_nothing_is_asked_while_nobody_listens() -> None:
    follower = Follower()
    assert follower.made.question() is None and not follower.made.is_on


def test_a_listing_is_taken_slice_by_slice() -> None:
    follower = Follower()
    follower.made.begin()
    question = follower.made.question()
    assert question == BeginListing((DEFAULT_TENANT,))
    follower.log.begin()
    follower.came(1)
    assert follower.made.answer(question, ExportListing(1))
    assert follower.made.question() is None, "what was told comes first"
    assert follower.publish() == 1
    question = follower.made.question()
    assert question == ContinueListing()
    follower.came(2)
    follower.log.note(ListingEnded())
    assert follower.made.answer(question, ExportListing(0))
    assert follower.publish() == 2
    assert follower.made.question() is None


def test_token_ids_are_read_for_those_that_lack_them() -> None:
    follower = listed(Follower())
    name = follower.came(1, has_tokens=False)
    assert follower.publish() == 0
    question = follower.made.question()
    assert question == ReadTokens((name,))
    assert follower.made.answer(question, BlockTokens((KnownTokens(name, (1, 2)),)))
    assert follower.publish() == 1 and follower.made.question() is None


def test_what_could_not_be_read_is_told_when_a_prompt_brings_its_tokens() -> None:
    follower = listed(Follower())
    name = follower.came(1, has_tokens=False)
    follower.publish()
    question = follower.made.question()
    assert question == ReadTokens((name,))
    assert follower.made.answer(question, BlockTokens(()))
    assert follower.publish() == 0 and follower.made.question() is None
    follower.came(1)
    assert follower.publish() == 1 and follower.made.question() is None


def test_a_full_queue_is_asked_again_later() -> None:
    follower = listed(Follower())
    name = follower.came(1, has_tokens=False)
    follower.publish()
    busy = Overloaded(Reason.QUEUE_FULL, "full")
    question = follower.made.question()
    assert question is not None and not follower.made.answer(question, busy)
    assert follower.made.question() == ReadTokens((name,))


def test_a_listing_that_was_refused_is_asked_again() -> None:
    follower = Follower()
    follower.made.begin()
    question = follower.made.question()
    assert question is not None and not follower.made.answer(question, Overloaded(Reason.QUEUE_FULL, ""))
    assert isinstance(follower.made.question(), BeginListing)


def test_a_log_that_went_off_is_listed_anew() -> None:
    follower = listed(Follower(log_limit=4))
    for number in range(9):
        follower.came(number)
    assert not follower.log.is_on and len(follower.log) == 4
    assert follower.publish() == 4
    question = follower.made.question()
    assert isinstance(question, BeginListing)
    follower.log.begin()
    follower.came(8)
    follower.log.note(ListingEnded())
    assert follower.made.answer(question, ExportListing(0))
    assert follower.publish() == 1


def test_another_tenants_root_is_asked_for() -> None:
    follower = listed(Follower())
    follower.made.begin(Tenant("b"))
    question = follower.made.question()
    assert isinstance(question, BeginListing) and set(question.tenants) == {DEFAULT_TENANT, Tenant("b")}
    follower.made.answer(question, ExportListing(0))
    follower.made.begin(Tenant("b"))
    assert follower.made.question() is None


def test_without_a_cache_nothing_is_asked_any_more() -> None:
    follower = Follower()
    follower.made.begin()
    question = follower.made.question()
    assert question is not None
    assert follower.made.answer(question, IcehouseError(Reason.CACHE_UNSUPPORTED, "none"))
    assert follower.made.question() is None and not follower.made.is_on


def listed(follower: Follower) -> Follower:
    follower.made.begin()
    question = follower.made.question()
    assert question is not None
    follower.log.begin()
    follower.log.note(ListingEnded())
    follower.made.answer(question, ExportListing(0))
    follower.publish()
    return follower
