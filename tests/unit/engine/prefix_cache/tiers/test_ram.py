"""The RAM tier: what it counts of what comes and goes."""

from __future__ import annotations

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_stats import TierStats
from icehouse_server.engine.prefix_cache.tiers import ram as ram_tier
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.ram import RamTier
from icehouse_server.pins import UNTIL_UNPINNED

from tests.fixtures.known_blocks import SIZE, record_of
from tests.unit.engine.prefix_cache.tiers.test_spill import Bench, bench, settled


def made(count: int, *, limit_bytes: int) -> tuple[Bench, RamTier, list[Node]]:
    tier = bench(policy="off", ram_limit_bytes=limit_bytes)
    nodes = tier.shelf.chain(range(count * SIZE), ram=True)
    return tier, tier.ram, nodes


def test_the_statistics_are_those_of_the_blocks() -> None:
    tier, ram, nodes = made(3, limit_bytes=100)
    tier.shelf.chain([*range(3 * SIZE), 7], ram=True)
    tier.shelf.tree.touch(nodes, now=5.0)
    tier.shelf.tree.set_pin(nodes[1], UNTIL_UNPINNED)
    told = ram.snapshot(now=7.0)
    assert (told.block_count, told.tail_count, told.pinned_block_count) == (4, 1, 1)
    assert told.token_count == 3 * SIZE + 1
    assert (told.size_bytes, told.limit_bytes, told.age.p50_s) == (40, 100, 2.0)


def test_ages_of_very_many_are_those_of_a_fair_part() -> None:
    tier, ram, nodes = made(20_000, limit_bytes=1 << 30)
    for number, node in enumerate(nodes):
        tier.shelf.tree.touch([node], now=float(number))
    age = ram.snapshot(now=20_000.0).age
    assert abs(age.p50_s - 10_000) < 100 and abs(age.p99_s - 19_800) < 100


def test_what_is_over_the_budget_already_goes_for_a_block_that_is_kept() -> None:
    tier, ram, nodes = made(10, limit_bytes=75)
    last = nodes[-1]
    assert tier.spills.is_on is False
    tier.shelf.tree.begin_spill(last, size_bytes=10)
    assert last.spill is not None
    last.spill.leaves_ram = True
    assert ram.retain([last], None) == []
    assert [node.ram_bytes > 0 for node in nodes] == [False] * 3 + [True] * 7


def test_evicted_purged_and_superseded_are_three_things() -> None:
    tier, ram, nodes = made(3, limit_bytes=100)
    shorter = tier.shelf.block(nodes[1].hash, 2 * SIZE, range(2 * SIZE, 2 * SIZE + 2), ram=True, ssd=False)
    assert ram.yield_bytes(1) == 10
    ram.purge(nodes[1])
    ram.supersede(nodes[2])
    assert not shorter.ram
    ram.purge(nodes[0])
    assert ram.stats == TierStats(evicted_block_total=1, evicted_byte_total=10, purged_block_total=1)
    assert list(tier.shelf.tree.in_ram()) == [nodes[2]] and tier.shelf.tree.ram.used_bytes == 10


def test_of_a_burst_of_blocks_that_are_copied_a_step_copies_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that decode wait for the copies. What is on SSD already is not copied, and takes no share."""
    tier = bench()
    tier.runner.copies_apart = True
    nodes = [tier.block(start) for start in range(0, 12 * SIZE, SIZE)]
    size_bytes = nodes[0].ram_bytes
    for node in nodes[-4:]:
        tier.shelf.tree.store(record_of(node, RegionKind.KV))
    tier.shelf.tree.touch(nodes, now=1.0)  # those on SSD are the end of the chain, and go first
    monkeypatch.setattr(ram_tier, "COPIED_BYTES", 2 * size_bytes)
    steps = [tier.ram.yield_bytes(7 * size_bytes, by_spilling=True) // size_bytes for _ in range(4)]
    assert steps == [6, 2, 2, 2] and tier.spills.drop_totals.total() == 0
    assert len(settled(tier)) == 8 and not tier.shelf.tree.ram.used_bytes
