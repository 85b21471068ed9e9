"""Numbers without a gap, a bounded ring, and readers that cost nobody anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.block_log import Came, Change, Left, RootsKnown
from icehouse_server.errors import EventsExpired, EventsLost
from icehouse_server.rpc.kv_events.block_mirror import (
    BlockMirror,
    BlocksCleared,
    BlockStored,
    KvBatch,
    KvBlock,
)
from icehouse_server.rpc.kv_events.event_feed import BATCH_TOKEN_COUNT, EventFeed, State, Subscription

from tests.fixtures.engine import FakeClock
from tests.fixtures.kv_events import Gateway

SIZE = 256
OWN, OTHER = Tenant(""), Tenant("other")
ROOTS = {OWN: BlockHash(b"o" * 32), OTHER: BlockHash(b"p" * 32)}


class Source:
    """A feed that is fed block by block."""

    def __init__(self, *, replay_limit_bytes: int = 1 << 20) -> None:
        self.clock = FakeClock()
        self.mirror = BlockMirror(block_token_count=SIZE, block_limit=10_000)
        self.feed = EventFeed(self.mirror, replay_limit_bytes=replay_limit_bytes, clock=self.clock)
        self.tell([RootsKnown(tuple((root, CacheScope(tenant)) for tenant, root in ROOTS.items()))])

    def tell(self, changes: list[Change]) -> None:
        self.feed.publish(self.mirror.apply(changes))

    def store(self, number: int, tenant: Tenant = OWN) -> None:
        self.tell([block(number, tenant)])

    @property
    def last_number(self) -> int:
        return self.feed.channel_of(None).last_number

    def subscribe(self, after_number: int = 0, tenant: Tenant | None = None) -> Subscription:
        return self.feed.subscribe(after_number=after_number, tenant=tenant)


def block(number: int, tenant: Tenant = OWN) -> Came:
    name = BlockHash(number.to_bytes(8, "big") * 4)
    return Came(Tier.RAM, name, ROOTS[tenant], True, SIZE, (number,) * SIZE)


def drain(subscription: Subscription) -> list[KvBatch]:
    batches = []
    while (batch := subscription.take()) is not None:
        batches.append(batch)
    return batches


def test_a_snapshot_ends_at_the_number_of_its_state() -> None:
    source = Source()
    for number in range(200):
        source.store(number, OTHER if number % 4 == 3 else OWN)
    last = source.last_number
    batches = drain(source.subscribe())
    assert [batch.sequence_number for batch in batches] == list(range(last - len(batches) + 1, last + 1))
    assert isinstance(batches[0].events[0], BlocksCleared)
    chunks = [batch.snapshot for batch in batches]
    assert [chunk.index for chunk in chunks if chunk is not None] == list(range(len(batches)))
    assert {(chunk.chunk_count, chunk.stored_count) for chunk in chunks if chunk} == {(len(batches), 200)}
    source.store(500)
    late, own = Gateway(source.feed), Gateway(source.feed, OWN)
    late.read(limit=None)
    own.read(limit=None)
    assert len(late.known) == 201 and len(own.known) == 151


def test_an_empty_server_is_told_as_that() -> None:
    (batch,) = drain(Source().subscribe())
    assert batch.events == (BlocksCleared(),) and batch.snapshot is not None
    assert (batch.snapshot.chunk_count, batch.snapshot.stored_count) == (1, 0)


def test_live_events_follow_a_snapshot_that_is_still_read() -> None:
    source = Source()
    for number in range(400):
        source.store(number)
    gateway = Gateway(source.feed)
    gateway.read(limit=2)
    source.tell([Left(Tier.RAM, block(0).name), block(1000)])
    gateway.read(limit=None)
    fresh = Gateway(source.feed)
    fresh.read(limit=None)
    assert gateway.known == fresh.known and len(gateway.known) == 400


def test_a_reader_goes_on_from_its_number() -> None:
    source = Source()
    gateway = Gateway(source.feed)
    gateway.read(limit=None)
    source.store(1)
    gateway.reconnect()
    source.store(2)
    gateway.read(limit=None)
    assert (len(gateway.known), gateway.cleared_count) == (2, 1)


def test_a_number_that_is_not_kept_is_out_of_range() -> None:
    source = Source(replay_limit_bytes=5_000)
    first = source.last_number
    for number in range(20):
        source.store(number)
    for number in (first, first - 1, 7, source.last_number + 1):
        with pytest.raises(EventsExpired, match="subscribe from 0") as caught:
            source.subscribe(number)
        assert caught.value.metadata["number"] == str(number)
    assert source.feed.lost_total == 0
    assert source.subscribe(source.last_number).take() is None


def test_a_restarted_server_never_goes_on_where_another_was() -> None:
    before = Source()
    for number in range(50):
        before.store(number)
    after = Source()
    after.clock.now = before.clock.now + 1.0
    restarted = EventFeed(after.mirror, replay_limit_bytes=1 << 20, clock=after.clock)
    restarted.publish(after.mirror.apply([block(number) for number in range(500)]))
    with pytest.raises(EventsExpired):
        restarted.subscribe(after_number=before.last_number, tenant=None)


def test_a_reader_that_is_overtaken_hears_of_it_and_begins_anew() -> None:
    source = Source(replay_limit_bytes=5_000)
    gateway = Gateway(source.feed)
    stalled = source.subscribe(tenant=OWN)
    stalled.take()
    for number in range(100):
        source.store(number)
        gateway.read(limit=None)
    with pytest.raises(EventsLost):
        stalled.take()
    assert source.feed.lost_total == 1 and gateway.lost_count == 0 and len(gateway.known) == 100
    fresh = Gateway(source.feed)
    fresh.read(limit=None)
    assert fresh.known == gateway.known


def test_the_ring_stays_within_its_bytes() -> None:
    source = Source(replay_limit_bytes=50_000)
    for number in range(1_000):
        source.store(number)
        assert source.feed.ring_bytes <= 50_000
    assert source.feed.event_total == 1_000


def test_one_tenants_reader_gets_its_events_and_no_number_tells_of_others() -> None:
    source = Source()
    for number in range(9):
        source.store(number, OWN)
    subscription = source.subscribe(tenant=OTHER)
    (state,) = drain(subscription)
    source.store(10, OWN)
    assert subscription.take() is None
    source.tell([block(11, OWN), block(12, OTHER), block(13, OWN)])
    source.store(14, OTHER)
    batches = drain(subscription)
    assert [batch.sequence_number - state.sequence_number for batch in batches] == [1, 2]
    assert [len(batch.events) for batch in batches] == [1, 1]
    events = [event for batch in batches for event in batch.events]
    assert {event.tenant for event in events if isinstance(event, BlockStored)} == {OTHER}


async def test_a_reader_is_not_woken_by_what_is_not_its_own() -> None:
    source = Source()
    waiting = asyncio.ensure_future(source.feed.channel_of(OTHER).wait())
    await asyncio.sleep(0)
    source.store(1, OWN)
    await asyncio.sleep(0)
    assert not waiting.done()
    source.store(2, OTHER)
    await waiting


def test_a_tenants_batches_go_with_those_they_are_parts_of() -> None:
    source = Source(replay_limit_bytes=5_000)
    own = source.subscribe(tenant=OWN)
    own.take()
    source.store(1, OWN)
    for number in range(2, 20):
        source.store(number, OTHER)
    with pytest.raises(EventsLost):
        own.take()
    assert source.feed.lost_total == 1
    late = Gateway(source.feed, OWN)
    late.read(limit=None)
    assert len(late.known) == 1


class Unwalked(dict[Any, Any]):
    """Another tenant's blocks."""

    def values(self) -> Any:
        raise AssertionError("they were walked")

    __iter__ = items = keys = values


def test_who_has_no_blocks_does_not_have_the_others_walked() -> None:
    source = Source()
    source.store(1, OTHER)
    source.mirror._published[OTHER] = Unwalked(source.mirror._published[OTHER])
    (batch,) = drain(source.subscribe(tenant=OWN))
    assert batch.events == (BlocksCleared(),)
    with pytest.raises(AssertionError, match="walked"):
        source.subscribe(tenant=None)


def test_a_state_is_taken_once_for_all_who_begin_with_it() -> None:
    source = Source()
    for number in range(10):
        source.store(number)
    taken: list[int] = []

    def state() -> State:
        taken.append(source.last_number)
        return source.mirror.published_blocks(None)

    source.feed.channel_of(None)._state_of_now = state
    gateways = []
    for number in range(10, 20):
        gateways += [Gateway(source.feed) for _ in range(5)]
        source.store(number)
    # A new one only when as much has happened since as it holds itself.
    assert len(taken) == 1
    source.store(20)
    gateways.append(Gateway(source.feed))
    assert len(taken) == 2
    for gateway in gateways:
        gateway.read(limit=None)
        assert len(gateway.known) == 21


def test_nobody_begins_with_a_state_that_was_overtaken() -> None:
    source = Source(replay_limit_bytes=50_000)
    for number in range(300):
        source.store(number)
    stalled = source.subscribe()
    stalled.take()
    for number in range(300, 400):
        source.store(number)
    assert source.feed.channel_of(None)._latest is None
    with pytest.raises(EventsLost):
        stalled.take()


def test_many_events_are_several_batches() -> None:
    source = Source()
    subscription = source.subscribe()
    subscription.take()
    source.tell([block(number) for number in range(300)])
    sizes = [sum(stored(event) for event in batch.events) for batch in drain(subscription)]
    assert sum(sizes) == 300 * SIZE and max(sizes) <= BATCH_TOKEN_COUNT and len(sizes) == 3


def stored(event: object) -> int:
    return event.block.token_count if isinstance(event, BlockStored) else 0


async def test_a_reader_waits_for_what_comes() -> None:
    source = Source()
    subscription = source.subscribe()
    assert subscription.take() is not None and subscription.take() is None
    waiting = asyncio.ensure_future(subscription.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    source.store(1)
    await waiting
    batch = subscription.take()
    assert batch is not None and isinstance(batch.events[0], BlockStored)
    assert subscription.take() is None


def test_a_block_knows_its_tokens() -> None:
    assert KvBlock(1, None, b"\0" * 8, CacheScope()).token_count == 2
