"""Bytes, order and victims of the RAM tier."""

from __future__ import annotations

from icehouse_server.domain.blocks import RegionKind, image_keys
from icehouse_server.domain.cache_stats import TierStats
from icehouse_server.domain.ids import ImageDigest
from icehouse_server.engine.core.block_log import BlockLog, Came, KvTier
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier

from tests.fixtures.known_blocks import ROOT, SIZE, Shelf, SizedRegion, root_of


def tier_with(count: int, *, limit_bytes: int = 100, size_bytes: int = 10) -> tuple[RamTier, list[Entry]]:
    tier = RamTier(limit_bytes=limit_bytes, block_token_count=SIZE, log=BlockLog())
    entries = Shelf().chain(list(range(count * SIZE)))
    for entry in entries:
        tier.put(entry, {RegionKind.KV: SizedRegion(size_bytes)})
    return tier, entries


def test_bytes_are_those_of_all_regions() -> None:
    tier, entries = tier_with(3)
    assert (len(tier), tier.used_bytes) == (3, 30)
    tier.put(entries[0], {RegionKind.WINDOW: SizedRegion(5)})
    assert (len(tier), tier.used_bytes, entries[0].ram_bytes) == (3, 35, 15)
    tier.put(entries[0], {RegionKind.WINDOW: SizedRegion(7)})
    assert tier.used_bytes == 37
    tier.drop(entries[0])
    assert (len(tier), tier.used_bytes, entries[0].ram) == (2, 20, {})


def test_a_block_with_an_image_is_noted_with_the_keys_that_tell_it_apart() -> None:
    log = BlockLog()
    log.begin()
    keys = image_keys(ImageDigest(bytes(32)), [7] * SIZE)
    (entry,) = Shelf().chain(list(keys))
    RamTier(limit_bytes=100, block_token_count=SIZE, log=log).put(entry, {RegionKind.KV: SizedRegion(10)})
    (*_, came) = log.take(limit=10)
    assert came == Came(KvTier.RAM, entry.hash, ROOT, True, SIZE, keys)


def test_a_touched_chain_ends_with_its_head() -> None:
    tier, entries = tier_with(4)
    tier.touch(entries[:3], now=5.0)
    assert [entry.start_token_index // SIZE for entry in tier] == [3, 2, 1, 0]
    assert [entry.last_used_time for entry in entries] == [5.0, 5.0, 5.0, 0.0]


def test_the_latest_are_pinned_ones_and_then_those_touched_last() -> None:
    tier, entries = tier_with(4)
    tier.touch(entries[:2], now=5.0)
    tier.set_pinned(entries[2], pinned=True)
    assert list(tier.latest(3)) == [entries[2], entries[0], entries[1]]


def test_victims_are_the_oldest_that_make_just_enough_room() -> None:
    tier, entries = tier_with(10)
    assert tier.victims(0) == []
    assert tier.victims(1) == entries[:1]
    assert tier.victims(25) == entries[:3]
    assert tier.victims(100) == entries
    assert tier.victims(101) is None, "not even all of them would do"
    assert tier.victims(-50) == []


def test_pinned_and_spared_ones_stay() -> None:
    tier, entries = tier_with(10)
    tier.set_pinned(entries[0], pinned=True)
    assert tier.victims(10, spared={entries[1].hash}) == [entries[2]]
    assert tier.victims(80, spared={entries[1].hash}) == entries[2:]
    assert tier.victims(81, spared={entries[1].hash}) is None


def test_who_looks_for_victims_passes_no_pinned_one() -> None:
    tier, entries = tier_with(10)
    for entry in entries[:8]:
        tier.set_pinned(entry, pinned=True)
    assert list(tier.candidates()) == entries[8:] and list(tier) == entries[8:] + entries[:8]
    assert (len(tier), tier.used_bytes, tier.pinned_by[ROOT]) == (10, 100, 80)
    tier.put(entries[0], {RegionKind.WINDOW: SizedRegion(5)})
    assert tier.pinned_by[ROOT] == 85 and entries[0] in tier.pinned
    # One that may go again is the most recently used, and one that is gone counts no more.
    tier.set_pinned(entries[0], pinned=False)
    assert list(tier.candidates()) == [*entries[8:], entries[0]] and tier.pinned_by[ROOT] == 70
    tier.drop(entries[1])
    assert tier.pinned_by[ROOT] == 60 and tier.snapshot(now=0.0).pinned_block_count == 6


def test_an_owners_blocks_come_in_their_order_and_go_with_it() -> None:
    tier, entries = tier_with(4)
    tier.touch(entries[:2], now=3.0)
    assert list(tier.oldest([ROOT])) == [entries[2], entries[3], entries[1], entries[0]]
    tier.set_owner(entries[2], root_of("other"))
    assert list(tier.oldest([ROOT])) == [entries[3], entries[1], entries[0]]
    assert (tier.used_by[ROOT], tier.used_by[root_of("other")]) == (30, 10)
    assert next(tier.oldest([root_of("other"), ROOT])) in entries[2:]
    assert list(tier.oldest([root_of("nobody")])) == []


def test_the_statistics_are_those_of_the_blocks() -> None:
    tier, entries = tier_with(3)
    tier.touch(entries, now=5.0)
    tier.set_pinned(entries[1], pinned=True)
    told = tier.snapshot(now=7.0)
    assert (told.block_count, told.tail_count, told.pinned_block_count, told.token_count) == (
        3,
        0,
        1,
        3 * SIZE,
    )
    assert (told.size_bytes, told.limit_bytes, told.age.p50_s) == (30, 100, 2.0)


def test_what_is_over_the_budget_already_counts() -> None:
    tier, entries = tier_with(10, limit_bytes=75)
    assert tier.victims(0) == entries[:3]


def test_evicted_purged_and_forgotten_are_three_things() -> None:
    tier, entries = tier_with(4)
    tier.drop(entries[0])
    tier.drop(entries[1], is_purge=True)
    assert tier.forget(entries[2]) and not tier.forget(entries[2])
    tier.drop(entries[0])
    assert tier.stats == TierStats(evicted_block_total=1, evicted_byte_total=10, purged_block_total=1)
    assert list(tier) == [entries[3]] and tier.used_bytes == 10
