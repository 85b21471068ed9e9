"""Which block goes to SSD, what it takes first, and what is under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.prefix_cache.planner import Rates
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.eviction import RamEviction
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.timeouts import Waits
from icehouse_server.storage.api import OVERHEAD_BYTES, Failure, Persisted

from tests.fixtures.engine import FakeClock
from tests.fixtures.known_blocks import FINGERPRINT, SIZE, Shelf, record_of, settings
from tests.fixtures.storage.memory_tier import Kept, MemoryTier
from tests.system.cache.token_runner import TokenRegion, TokenRunner


@dataclasses.dataclass
class Bench:
    shelf: Shelf
    tier: MemoryTier
    ended: list[Persisted | Failure]
    runner: TokenRunner
    counters: PrefixCounters
    quotas: TenantQuotas
    spills: Spills

    def block(self, start: int = 0, count: int = SIZE) -> Entry:
        """Put the next block of one chain into RAM, with the tokens it is made of."""
        tokens = list(range(1, 1 + start + count))
        entry = self.shelf.chain(tokens)[-1]
        region = TokenRegion(RegionKind.KV, entry.token_ids or ())
        entry.ram = {RegionKind.KV: region}
        return entry


def bench(*, policy: str = "on_evict", min_prefix: int = 0, limit_bytes: int = 1 << 20) -> Bench:
    shelf, counters = Shelf(), PrefixCounters()
    ended: list[Persisted | Failure] = []
    tier = MemoryTier(post=lambda posted: waits.settle(posted), queue_limit_bytes=limit_bytes)
    waits = Waits(tier, Rates(), FakeClock())
    runner = TokenRunner(CacheFacts())
    limits = settings(spill_policy=policy, min_prefix_token_count=min_prefix)
    log = BlockLog()
    ram = RamTier(limit_bytes=0, block_token_count=SIZE, log=log)
    quotas = TenantQuotas(limits, index=shelf.index, ram=ram, log=log)
    spills = Spills(
        limits,
        facts=CacheFacts(),
        index=shelf.index,
        quotas=quotas,
        counters=counters,
        runner=runner,
        waits=waits,
        ended=lambda entry, outcome: ended.append(outcome),
    )
    return Bench(shelf, tier, ended, runner, counters, quotas, spills)


def settled(made: Bench) -> list[Kept]:
    """Have the tier do all that it was given; return what it holds."""
    while made.tier.step():
        pass
    return list(made.tier.kept.values())


def test_a_block_is_sent_once() -> None:
    made = bench()
    entry = made.block()
    assert made.spills.wants(entry) and made.spills.send(entry, request_id=None)
    assert entry.is_spilling and made.spills.under_way_count == 1
    assert not made.spills.wants(entry) and not made.spills.send(entry, request_id=None)
    assert made.tier.step() and not made.tier.step()
    made.shelf.index.end_spill(entry)
    made.shelf.index.add_stored(record_of(entry, RegionKind.KV))
    assert made.spills.under_way_count == 0
    assert not made.spills.wants(entry) and not made.spills.send(entry, request_id=None), "it is there"
    (block,) = made.tier.kept.values()
    assert made.ended == [Persisted(block, None, 1.0, 0.5)]
    assert block.header.token_ids == entry.token_ids and block.header.fingerprint == FINGERPRINT
    assert made.counters.drop_totals.total() == 0


def test_a_block_is_handed_over_once_its_copy_is_there() -> None:
    """Where a pass is in flight that comes in a later step, and nobody waits for it."""
    made = bench()
    made.runner.is_copying = True
    first, second = made.block(), made.block(SIZE)
    assert made.spills.send(first, request_id=None) and made.spills.send(second, request_id=None)
    assert first.is_spilling and made.spills.under_way_count == 2
    made.spills.hand_over(may_wait=False)
    assert not made.tier.step(), "nothing is handed over yet"
    room = made.tier.room_bytes
    made.spills._copying_bytes += room - 2 * OVERHEAD_BYTES
    assert not made.spills.has_credit(made.block(2 * SIZE)), "room bounds what is on its way, too"
    made.spills._copying_bytes -= room - 2 * OVERHEAD_BYTES
    first.is_pinned = True
    made.runner.is_copying = False
    made.spills.hand_over(may_wait=False)
    written = settled(made)
    assert [block.header.token_ids for block in written] == [first.token_ids, second.token_ids]
    assert [block.pinned for block in written] == [True, False], "what was ordered meanwhile holds"


def test_where_nothing_else_runs_a_copy_is_waited_for() -> None:
    made = bench()
    made.runner.is_copying = True
    assert made.spills.send(made.block(), request_id=None) and not settled(made)
    made.spills.hand_over(may_wait=True)
    assert settled(made)


def test_what_is_ordered_of_a_block_comes_behind_it() -> None:
    """Or the storage thread would write what it was told to remove."""
    made = bench()
    made.runner.is_copying = True
    first, second, third = made.block(), made.block(SIZE), made.block(2 * SIZE)
    for entry in (first, second, third):
        made.spills.send(entry, request_id=None)
    made.spills.remove((second.hash,))
    assert [block.hash for block in settled(made)] == [first.hash], "written, and then removed"
    made.spills.pin((third.hash,), pinned=True)
    assert [(block.hash, block.pinned) for block in settled(made)] == [
        (first.hash, False),
        (third.hash, True),
    ]


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_the_memory_of_a_block_that_leaves_is_free_once_it_is_copied(is_apart: bool, is_early: bool) -> None:
    """A view holds it until it is written; a block that is sent early and goes later goes at once."""
    made = bench()
    made.runner.is_copying, made.runner.copies_apart = not is_early, is_apart
    entry = made.block()
    regions, entry.ram = entry.ram, {}
    ram = RamTier(limit_bytes=entry_bytes(regions), block_token_count=SIZE, log=BlockLog())
    eviction = RamEviction(ram=ram, index=made.shelf.index, spills=made.spills, quotas=made.quotas)
    ram.put(entry, regions)
    if is_early:
        made.spills.send(entry, request_id=None)
    assert ram.used_bytes
    assert eviction.make_space(1, spared=(), owner=None, request_id=None)
    assert entry.is_leaving and bool(ram.used_bytes) is (not is_apart or not is_early)
    made.runner.is_copying = False
    made.spills.hand_over(may_wait=False)
    assert bool(ram.used_bytes) is not is_apart
    assert eviction.keep([entry], None) == ([entry] if is_apart else [])
    eviction.spill_ended(entry, is_kept_on_ssd=True)
    assert not entry.is_spilling and bool(entry.ram) is not is_apart


def entry_bytes(regions: Mapping[RegionKind, Region]) -> int:
    return sum(region.size_bytes for region in regions.values())


def test_without_credit_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(limit_bytes=100)
    monkeypatch.setattr(made.runner, "begin_to_host", lambda regions: pytest.fail("copied without credit"))
    entry = made.block()
    assert not made.spills.has_credit(entry) and not made.spills.send(entry, request_id=None)
    assert made.counters.drop_totals == {SpillDropCause.NO_CREDIT: 1}
    assert made.spills.under_way_count == 0 and not entry.is_spilling


def test_asking_for_credit_takes_none() -> None:
    made = bench()
    for _ in range(100):
        assert made.spills.has_credit(made.block())
    assert made.tier.room_bytes == 1 << 20


def test_a_block_without_its_kv_is_not_worth_a_file() -> None:
    made = bench()
    entry = made.block()
    entry.ram = {RegionKind.WINDOW: TokenRegion(RegionKind.WINDOW, (1,))}
    assert not made.spills.wants(entry)


def test_short_prefixes_go_only_with_longer_ones() -> None:
    made = bench(min_prefix=3 * SIZE)
    first, second = made.block(0), made.block(SIZE)
    assert not made.spills.wants(first) and not made.spills.send(second, request_id=None)
    assert made.counters.drop_totals == {SpillDropCause.PREFIX_SHORT: 1}
    third = made.block(2 * SIZE)
    assert all(made.spills.wants(entry) for entry in (first, second, third))


def test_off_is_silent() -> None:
    made = bench(policy="off")
    entry = made.block()
    assert (
        not made.spills.is_on
        and not made.spills.wants(entry)
        and not made.spills.send(entry, request_id=None)
    )
    assert made.counters.drop_totals.total() == 0


def test_a_lost_tier_takes_its_queue_along() -> None:
    made = bench()
    entry = made.block()
    made.spills.send(entry, request_id=None)
    RamEviction(
        ram=RamTier(limit_bytes=0, block_token_count=SIZE, log=BlockLog()),
        index=made.shelf.index,
        spills=made.spills,
        quotas=made.quotas,
    ).lose_storage()
    assert (made.spills.under_way_count, entry.is_spilling, made.spills.is_on) == (0, False, False)
    assert not made.spills.has_credit(entry) and not made.spills.send(entry, request_id=None)


def test_a_chain_that_is_kept_takes_no_room_from_itself() -> None:
    made = bench()
    first, second = made.block(), made.block(SIZE)
    other = made.shelf.chain(range(100, 100 + SIZE))[-1]
    region = TokenRegion(RegionKind.KV, other.token_ids or ())
    ram = RamTier(limit_bytes=2 * region.size_bytes, block_token_count=SIZE, log=BlockLog())
    eviction = RamEviction(ram=ram, index=made.shelf.index, spills=made.spills, quotas=made.quotas)
    for entry in (first, second, other):
        regions, entry.ram = entry.ram or {RegionKind.KV: region}, {}
        ram.put(entry, regions)
    ram.set_pinned(other, pinned=True)
    assert made.spills.send(first, request_id=None) and first.spill is not None
    first.spill.leaves_ram = True
    assert eviction.keep([first, second], None) == [first] and not second.is_leaving
