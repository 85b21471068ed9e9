"""Which block goes to SSD, what it takes first, and what is under way."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.ram import RamTier
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates, StorageWaits
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import OVERHEAD_BYTES, BlockPersisted, Outcome, StorageFailure, Ticket

from tests.fixtures.engine import FakeClock
from tests.fixtures.known_blocks import FINGERPRINT, SIZE, Shelf, record_of
from tests.fixtures.storage.memory_tier import Kept, MemoryTier
from tests.system.cache.token_runner import TokenRegion, TokenRunner

TOKEN_BYTES = 4
"""What the token runner keeps of each."""


@dataclasses.dataclass
class Bench:
    shelf: Shelf
    tier: MemoryTier
    ended: list[BlockPersisted | StorageFailure]
    runner: TokenRunner
    spills: Spills
    ram: RamTier

    def block(self, start: int = 0, count: int = SIZE) -> Node:
        """Put the next block of one chain into RAM, with the tokens it is made of."""
        tokens = list(range(1, 1 + start + count))
        node = self.shelf.chain(tokens)[-1]
        hold(self.shelf, node, RegionKind.KV)
        return node


def hold(shelf: Shelf, node: Node, kind: RegionKind) -> None:
    """Have RAM hold a region of a block with the tokens it is made of."""
    region = TokenRegion(kind, node.token_ids or ())
    shelf.tree.add_regions(node, {kind: region})


def bench(
    *, policy: str = "on_evict", min_prefix: int = 0, limit_bytes: int = 1 << 20, ram_limit_bytes: int = 0
) -> Bench:
    shelf = Shelf(spill_policy=policy, min_prefix_token_count=min_prefix, ram_limit_bytes=ram_limit_bytes)
    runner = TokenRunner(CacheFacts())
    ended: list[BlockPersisted | StorageFailure] = []

    def post(posted: Outcome) -> None:
        if isinstance(posted, Ticket):
            waits.complete(posted)

    tier = MemoryTier(clock=FakeClock(), post=post, queue_limit_bytes=limit_bytes)
    waits = StorageWaits(tier, Rates(), FakeClock())
    quotas = TenantQuotas(shelf.tree)
    spills = Spills(
        shelf.tree,
        quotas=quotas,
        runner=runner,
        waits=waits,
        ended=lambda node, outcome: ended.append(outcome),
    )
    ram = RamTier(shelf.tree, spills=spills, quotas=quotas)
    return Bench(shelf, tier, ended, runner, spills, ram)


def settled(made: Bench) -> list[Kept]:
    """Have the tier do all that it was given; return what it holds."""
    while made.tier.step():
        pass
    return list(made.tier.kept.values())


def test_a_block_is_sent_once() -> None:
    made = bench()
    node = made.block()
    assert made.spills.wants(node) and made.spills.send(node, request_id=None)
    assert node.is_spilling and made.spills.under_way_count == 1
    assert not made.spills.wants(node) and not made.spills.send(node, request_id=None)
    assert made.tier.step() and not made.tier.step()
    made.shelf.tree.end_spill(node)
    made.shelf.tree.store(record_of(node, RegionKind.KV))
    assert made.spills.under_way_count == 0
    assert not made.spills.wants(node) and not made.spills.send(node, request_id=None), "it is there"
    (block,) = made.tier.kept.values()
    assert made.ended == [BlockPersisted(block, None, 1.0, 0.5)]
    assert block.header.token_ids == node.token_ids and block.header.fingerprint == FINGERPRINT
    assert made.spills.drop_totals.total() == 0


def test_a_block_is_handed_over_once_its_copy_is_there() -> None:
    """Where a pass is in flight that comes in a later step, and nobody waits for it."""
    made = bench()
    made.runner.is_copying = True
    first, second = made.block(), made.block(SIZE)
    assert made.spills.send(first, request_id=None) and made.spills.send(second, request_id=None)
    assert first.is_spilling and made.spills.under_way_count == 2
    made.spills.hand_over(may_wait=False)
    assert not made.tier.step(), "nothing is handed over yet"
    room = made.tier.queue_space_bytes
    made.spills._copying_bytes += room - 2 * OVERHEAD_BYTES
    assert not made.spills.has_credit(made.block(2 * SIZE)), "room bounds what is on its way, too"
    made.spills._copying_bytes -= room - 2 * OVERHEAD_BYTES
    made.shelf.tree.set_pin(first, UNTIL_UNPINNED)
    made.runner.is_copying = False
    made.spills.hand_over(may_wait=False)
    written = settled(made)
    assert [block.header.token_ids for block in written] == [first.token_ids, second.token_ids]
    assert [block.pin_end_time > NOT_PINNED for block in written] == [True, False], (
        "what was ordered meanwhile holds"
    )


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
    for node in (first, second, third):
        made.spills.send(node, request_id=None)
    made.spills.remove((second.hash,))
    assert [block.hash for block in settled(made)] == [first.hash], "written, and then removed"
    made.spills.pin((third.hash,), UNTIL_UNPINNED)
    assert [(block.hash, block.pin_end_time > NOT_PINNED) for block in settled(made)] == [
        (first.hash, False),
        (third.hash, True),
    ]


@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_the_memory_of_a_block_that_leaves_is_free_once_it_is_copied(is_apart: bool, is_early: bool) -> None:
    """A view holds it until it is written; a block that is sent early and goes later goes at once."""
    made = bench(ram_limit_bytes=TOKEN_BYTES * SIZE)
    made.runner.is_copying, made.runner.copies_apart = not is_early, is_apart
    node, ram = made.block(), made.shelf.tree.ram
    if is_early:
        made.spills.send(node, request_id=None)
    assert ram.used_bytes
    assert made.ram._make_space(1, protected=(), owner=None, request_id=None)
    assert node.is_leaving and bool(ram.used_bytes) is (not is_apart or not is_early)
    made.runner.is_copying = False
    made.spills.hand_over(may_wait=False)
    assert bool(ram.used_bytes) is not is_apart
    assert made.ram.retain([node], None) == ([node] if is_apart else [])
    made.ram.end_spill(node, is_pinned_on_ssd=True)
    assert not node.is_spilling and bool(node.ram) is not is_apart


def test_without_credit_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(limit_bytes=100)
    monkeypatch.setattr(made.runner, "begin_to_host", lambda regions: pytest.fail("copied without credit"))
    node = made.block()
    assert not made.spills.has_credit(node) and not made.spills.send(node, request_id=None)
    assert made.spills.drop_totals == {SpillDropCause.NO_CREDIT: 1}
    assert made.spills.under_way_count == 0 and not node.is_spilling


def test_what_others_have_filled_is_waited_for_and_what_never_fits_is_not() -> None:
    made = bench()
    node = made.block()
    assert not made.spills.must_wait(node)
    room, made.tier.queue_space_bytes = made.tier.queue_space_bytes, 0
    assert made.spills.must_wait(node)
    assert made.ram.yield_bytes(1, by_spilling=True) == 0 and made.spills.drop_totals.total() == 0
    assert node.ram, "it can still be written"
    made.tier.queue_space_bytes = room
    assert made.ram.yield_bytes(1, by_spilling=True) == 0 and node.is_spilling
    small = bench(limit_bytes=100)
    assert not small.spills.must_wait(small.block())


def test_asking_for_credit_takes_none() -> None:
    made = bench()
    for _ in range(100):
        assert made.spills.has_credit(made.block())
    assert made.tier.queue_space_bytes == 1 << 20


def test_a_block_without_its_kv_is_not_worth_a_file() -> None:
    made = bench()
    node = made.block()
    made.shelf.tree.drop(node)
    node = made.shelf.chain(list(range(1, 1 + SIZE)))[-1]
    hold(made.shelf, node, RegionKind.WINDOW)
    assert not made.spills.wants(node)


def test_short_prefixes_go_only_with_longer_ones() -> None:
    made = bench(min_prefix=3 * SIZE)
    first, second = made.block(0), made.block(SIZE)
    assert not made.spills.wants(first) and not made.spills.send(second, request_id=None)
    assert made.spills.drop_totals == {SpillDropCause.PREFIX_SHORT: 1}
    third = made.block(2 * SIZE)
    assert all(made.spills.wants(node) for node in (first, second, third))


def test_off_is_silent() -> None:
    made = bench(policy="off")
    node = made.block()
    assert (
        not made.spills.is_on and not made.spills.wants(node) and not made.spills.send(node, request_id=None)
    )
    assert made.spills.drop_totals.total() == 0


def test_a_lost_tier_takes_its_queue_along() -> None:
    made = bench()
    node = made.block()
    made.spills.send(node, request_id=None)
    made.ram.lose_storage()
    assert (made.spills.under_way_count, node.is_spilling, made.spills.is_on) == (0, False, False)
    assert not made.spills.has_credit(node) and not made.spills.send(node, request_id=None)


def test_a_chain_that_is_kept_takes_no_room_from_itself() -> None:
    made = bench(ram_limit_bytes=2 * TOKEN_BYTES * SIZE)
    first, second = made.block(), made.block(SIZE)
    other = made.shelf.chain(range(100, 100 + SIZE))[-1]
    hold(made.shelf, other, RegionKind.KV)
    made.shelf.tree.set_pin(other, UNTIL_UNPINNED)
    assert first.ram_bytes == TOKEN_BYTES * SIZE
    assert made.spills.send(first, request_id=None) and first.spill is not None
    first.spill.leaves_ram = True
    assert made.ram.retain([first, second], None) == [first] and not second.is_leaving
