"""What is written to SSD while the disk is idle: when, in which order, and how much at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.engine.prefix_cache.tiers import write_behind
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.ram import RamTier
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates, StorageWaits
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.tiers.write_behind import (
    FAILURE_PAUSE_S,
    PASSES_BETWEEN,
    QUIET_S,
    Beside,
    Turn,
    WriteBehind,
)
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED
from icehouse_server.storage.api import BlockPersisted, Outcome, StorageFailure, Ticket, WriteBudget

from tests.fixtures.engine import FakeClock
from tests.fixtures.known_blocks import SIZE, Shelf, record_of
from tests.fixtures.storage.memory_tier import MemoryTier
from tests.system.cache.token_runner import TokenRegion, TokenRunner


class House:
    """A tree, a tier in memory and what writes behind, on a clock that stands still."""

    def __init__(self, *, policy: str = "write_behind", **settings: object) -> None:
        self.clock = FakeClock()
        self.shelf = Shelf(spill_policy=policy, **settings)
        self.tree = self.shelf.tree
        self.runner = TokenRunner(CacheFacts())
        self.tier = MemoryTier(clock=self.clock, post=self._take)
        self._waits = StorageWaits(self.tier, Rates(), self.clock)
        quotas = TenantQuotas(self.tree)
        self.spills = Spills(
            self.tree, quotas=quotas, runner=self.runner, waits=self._waits, ended=self._ended
        )
        self.behind = WriteBehind(self.tree, spills=self.spills, clock=self.clock)
        self.ram = RamTier(self.tree, spills=self.spills, quotas=quotas)

    def chain(self, count: int, *, salt: int = 0) -> list[Node]:
        """Put a chain of full blocks into RAM."""
        nodes = self.shelf.chain(range(100 * salt, 100 * salt + count * SIZE))
        for node in nodes:
            self.tree.add_regions(node, {RegionKind.KV: TokenRegion(RegionKind.KV, node.token_ids or ())})
        return nodes

    def be_quiet(self) -> None:
        self.clock.now += QUIET_S

    def offer(
        self, beside: Beside = Beside.NOTHING, *, is_restoring: bool = False, lacks_memory: bool = False
    ) -> None:
        self.behind.offer(beside, is_restoring=is_restoring, lacks_memory=lacks_memory)

    def sent(self) -> list[int]:
        """Return where the blocks under way start, in the order they were sent."""
        return [node.start_token_index for node in self.tree.spilling]

    def write(self) -> int:
        """Have the tier write what it was given; return how many blocks it has."""
        while self.tier.step():
            pass
        return len(self.tier.kept)

    def _take(self, posted: Outcome) -> None:
        if isinstance(posted, Ticket):
            self._waits.complete(posted)

    def _ended(self, node: Node, outcome: BlockPersisted | StorageFailure) -> None:
        self.behind.note_end(node, outcome)
        if isinstance(outcome, BlockPersisted):
            self.tree.store(record_of(node, RegionKind.KV, pin_end_time=node.pin_end_time))
        self.ram.end_spill(node, is_pinned_on_ssd=node.is_pinned)


@pytest.fixture
def house() -> House:
    return House()


def starts(nodes: Sequence[Node]) -> list[int]:
    return [node.start_token_index for node in nodes]


def test_a_quiet_disk_gets_a_chain_from_its_beginning(house: House) -> None:
    nodes = house.chain(3)
    house.behind.note(nodes, Turn.LIKELY)
    house.offer()
    assert house.sent() == [], "the disk has just been busy"
    house.be_quiet()
    house.offer()
    assert house.sent() == starts(nodes) and house.behind.waiting_count == 3
    assert house.write() == 3
    assert house.behind.waiting_count == 0
    assert house.behind.block_total == 3
    assert house.behind.byte_total == sum(kept.file_bytes for kept in house.tier.kept.values()) > 0
    assert all(node.ram and node.is_safe for node in nodes), "they stay in RAM, and may go"


def test_pinned_blocks_go_before_a_sessions_and_these_before_all_others(house: House) -> None:
    other, session, pinned = house.chain(1), house.chain(2, salt=1)[1:], house.chain(3, salt=2)[2:]
    house.behind.note(other, Turn.OTHER)
    house.behind.note(session, Turn.LIKELY)
    house.behind.note(pinned, Turn.OTHER)
    house.behind.note(pinned, Turn.PINNED)
    house.behind.note(pinned, Turn.OTHER)
    assert house.behind.waiting_count == 3, "each once"
    house.be_quiet()
    house.offer()
    assert house.sent() == starts([*pinned, *session, *other])


@pytest.mark.parametrize("policy", ["on_evict", "off"])
def test_other_policies_write_nothing_behind(policy: str) -> None:
    house = House(policy=policy)
    house.behind.note(house.chain(1), Turn.PINNED)
    house.be_quiet()
    house.offer()
    assert house.sent() == [] and house.behind.waiting_count == 0


def test_other_writes_and_restores_go_first(house: House) -> None:
    evicted, *nodes = house.chain(3)
    house.behind.note(nodes, Turn.LIKELY)
    house.be_quiet()
    house.offer(is_restoring=True)
    house.be_quiet()
    assert house.sent() == []
    house.spills.send(evicted, request_id=None)
    house.offer()
    assert house.sent() == [0]
    house.write()
    house.offer()
    assert house.sent() == [], "the disk was busy a moment ago"
    house.be_quiet()
    house.offer()
    assert house.sent() == starts(nodes)


def test_beside_prefill_one_block_goes_and_the_next_with_the_next_pass(house: House) -> None:
    house.behind.note(house.chain(3), Turn.LIKELY)
    house.be_quiet()
    house.offer(Beside.PREFILL)
    assert house.sent() == [0]
    house.offer(Beside.PREFILL)
    assert house.sent() == [0, SIZE], "its own writes do not make the disk busy"


def test_beside_decode_few_passes_see_a_block(house: House) -> None:
    house.behind.note(house.chain(3), Turn.LIKELY)
    house.be_quiet()
    for _ in range(PASSES_BETWEEN - 1):
        house.offer(Beside.DECODE)
    assert house.sent() == []
    house.offer(Beside.DECODE)
    assert house.sent() == [0]
    house.offer(Beside.DECODE)
    assert house.sent() == [0]
    house.offer()
    assert house.sent() == [0, SIZE, 2 * SIZE], "nothing decodes any more"


def test_on_shared_cores_writes_take_their_share_of_the_time() -> None:
    house = House(write_share_beside_passes=0.1)
    house.behind.note(house.chain(3), Turn.LIKELY)
    house.be_quiet()
    house.offer(Beside.PREFILL)
    assert house.sent() == [0]
    house.offer(Beside.PREFILL)
    assert house.sent() == [0], "one at a time"
    house.write()
    house.clock.now += 0.5 * 9 - 0.1
    house.offer(Beside.PREFILL)
    assert house.sent() == [], "the tier says that the write took half a second"
    house.clock.now += 0.2
    house.offer(Beside.PREFILL)
    assert house.sent() == [SIZE]
    house.offer()
    assert house.sent() == [SIZE, 2 * SIZE], "nothing else needs the cores"


def test_bytes_in_flight_are_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = house.chain(5)
    monkeypatch.setattr(write_behind, "IN_FLIGHT_BYTES", 2 * nodes[0].ram_bytes)
    house.behind.note(nodes, Turn.LIKELY)
    house.be_quiet()
    house.offer()
    assert house.sent() == starts(nodes[:2])
    assert house.tier.step()
    house.offer()
    assert house.sent() == starts(nodes[1:3]), "a place is free"


def test_a_step_copies_little(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = house.chain(4)
    monkeypatch.setattr(write_behind, "_STEP_BYTES", nodes[0].ram_bytes + 1)
    house.behind.note(nodes, Turn.LIKELY)
    house.be_quiet()
    house.offer()
    assert house.sent() == starts(nodes[:2])


def test_a_full_queue_is_waited_for_and_nothing_counts_as_dropped(house: House) -> None:
    house.behind.note(house.chain(1), Turn.LIKELY)
    room, house.tier.queue_space_bytes = house.tier.queue_space_bytes, 10
    house.be_quiet()
    house.offer()
    assert house.sent() == [] and house.spills.drop_totals.total() == 0
    house.tier.queue_space_bytes = room
    house.offer()
    assert house.sent() == [0]


def test_half_of_the_days_budget_is_for_evictions_and_for_what_is_likely(house: House) -> None:
    (other,), (session,) = house.chain(1), house.chain(2, salt=1)[1:]
    size_bytes = other.ram_bytes
    house.behind.note([other], Turn.OTHER)
    house.behind.note([session], Turn.LIKELY)
    house.be_quiet()
    house.tier.write_budget = WriteBudget(8 * size_bytes, size_bytes - 1)
    house.offer()
    assert house.sent() == [], "nothing fits"
    house.tier.write_budget = WriteBudget(8 * size_bytes, 6 * size_bytes - 1)
    house.offer()
    assert house.sent() == starts([session]), "what is in flight counts"
    house.tier.write_budget = WriteBudget(8 * size_bytes, 6 * size_bytes)
    house.offer()
    assert house.sent() == starts([session, other])


def test_after_a_failure_the_disk_is_left_alone_for_a_while(house: House) -> None:
    nodes = house.chain(2)
    house.behind.note(nodes[:1], Turn.LIKELY)
    house.tier.takes_blocks = False
    house.be_quiet()
    house.offer()
    assert house.sent() == [0] and house.write() == 0
    assert house.behind.waiting_count == 0 == house.behind.block_total
    assert nodes[0].ram and not nodes[0].is_safe
    house.tier.takes_blocks = True
    house.behind.note(nodes, Turn.LIKELY)
    house.be_quiet()
    house.offer()
    assert house.sent() == []
    house.clock.now += FAILURE_PAUSE_S
    house.offer()
    assert house.sent() == starts(nodes)


def test_while_a_request_lacks_memory_only_pinned_blocks_go_and_then_give_way(house: House) -> None:
    (session,), (pinned,) = house.chain(1), house.chain(2, salt=1)[1:]
    house.tree.set_pin(pinned, UNTIL_UNPINNED)
    house.behind.note([session], Turn.LIKELY)
    house.behind.note([pinned], Turn.PINNED)
    house.be_quiet()
    house.offer(lacks_memory=True)
    assert house.sent() == starts([pinned])
    size_bytes = house.tree.ram.used_bytes
    assert house.ram.yieldable_bytes() == size_bytes - pinned.ram_bytes
    house.write()
    assert house.ram.yieldable_bytes() == size_bytes
    assert house.ram.yield_bytes(size_bytes) == size_bytes
    assert not pinned.ram and pinned.ssd and pinned.is_pinned
    assert [kept.pin_end_time > NOT_PINNED for kept in house.tier.kept.values()] == [True]


def test_what_is_gone_or_written_by_its_turn_is_passed_over(house: House) -> None:
    gone, written, left = house.chain(3)
    house.behind.note([gone, written, left], Turn.LIKELY)
    house.ram.purge(gone)
    house.spills.send(written, request_id=None)
    house.write()
    house.be_quiet()
    house.offer()
    house.be_quiet()
    house.offer()
    assert house.sent() == starts([left]) and house.write() == 2
    assert house.behind.block_total == 1


def test_names_of_what_is_gone_do_not_add_up(house: House) -> None:
    kept = house.chain(1)
    house.behind.note(kept, Turn.LIKELY)
    for salt in range(1, 20):
        nodes = house.chain(1, salt=salt)
        house.behind.note(nodes, Turn.LIKELY)
        house.ram.purge(nodes[0])
    assert house.behind.waiting_count <= 4
    house.be_quiet()
    house.offer()
    assert house.sent() == [0]


def test_a_short_beginning_goes_with_what_makes_it_long_enough() -> None:
    house = House(min_prefix_token_count=2 * SIZE)
    (first,) = house.chain(1)
    house.behind.note([first], Turn.LIKELY)
    assert house.behind.waiting_count == 0
    first, second = house.chain(2)
    house.behind.note([second], Turn.LIKELY)
    house.be_quiet()
    house.offer()
    assert house.sent() == starts([first, second])
    assert house.spills.drop_totals[SpillDropCause.PREFIX_SHORT] == 0


def test_nothing_waits_for_a_tier_that_is_lost(house: House) -> None:
    house.behind.note(house.chain(2), Turn.LIKELY)
    house.be_quiet()
    house.offer(Beside.PREFILL)
    house.ram.lose_storage()
    house.behind.lose_storage()
    assert house.behind.waiting_count == 0
    house.behind.note(house.chain(1, salt=1), Turn.LIKELY)
    house.offer()
    assert house.behind.waiting_count == 0 and house.sent() == []


@pytest.mark.parametrize("copies_apart", [True, False])
def test_a_block_being_written_may_leave_ram_once_it_is_copied(house: House, copies_apart: bool) -> None:
    house.runner.copies_apart = copies_apart
    (node,) = house.chain(1)
    size_bytes = node.ram_bytes
    house.behind.note([node], Turn.LIKELY)
    house.be_quiet()
    house.offer()
    assert house.sent() == [0]
    assert house.ram.yieldable_bytes() == (size_bytes if copies_apart else 0)
    assert house.ram.yield_bytes(size_bytes) == (size_bytes if copies_apart else 0)
    assert house.write() == 1 and bool(node.ram) is not copies_apart and node.ssd
