"""The tiers of all ranks as one: what all have, what one lacks, reads that end on all or are given up."""

from __future__ import annotations

from typing import Any

import pytest
from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.domain.blocks import BlockDamage, RegionKind
from icehouse_server.domain.ids import BlockHash
from icehouse_server.group import leader_tier
from icehouse_server.storage.api import (
    AnyTicket,
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    Inventory,
    StorageFailed,
    StorageFailure,
    Ticket,
)

from tests.fixtures.storage.blocks import RATES
from tests.fixtures.storage.loading import assert_holds
from tests.unit.group.ranks import Ranks, chain_of, evicted, names_of


@pytest.fixture
def ranks() -> Ranks:
    opened = Ranks()
    opened.open()
    return opened


def kept(ranks: Ranks) -> list[set[BlockHash]]:
    return [set(ranks.own.kept), *(set(each.tier.kept) for each in ranks.followers)]


def reopened(ranks: Ranks) -> Ranks:
    """Return the same directories after a start."""
    again = Ranks(1 + len(ranks.followers))
    again.own.kept.update(ranks.own.kept)
    for old, new in zip(ranks.followers, again.followers, strict=True):
        new.tier.kept.update(old.tier.kept)
    return again


def test_each_rank_stores_its_part_under_one_name(ranks: Ranks) -> None:
    chain = ranks.stored()
    names = {block.header.hash for block in chain}
    assert kept(ranks) == [names, names]
    for block in chain:
        own, theirs = (tier.kept[block.header.hash] for tier in (ranks.own, ranks.one.tier))
        assert own.regions[RegionKind.KV] != theirs.regions[RegionKind.KV]
        assert own.header.fingerprint != theirs.header.fingerprint


def test_the_inventory_is_what_all_have_and_the_rest_goes() -> None:
    ranks = Ranks(3)
    ranks.open()
    chain = ranks.stored(4)
    names = [block.header.hash for block in chain]
    again = reopened(ranks)
    del again.own.kept[names[0]], again.followers[0].tier.kept[names[1]]
    del again.followers[1].tier.kept[names[2]]
    again.own.open()
    again.followers[0].tier.open()
    again.followers[0].deliver()
    assert not again.posted, "rank 2 has not said yet what it has"
    again.followers[1].tier.open()
    again.followers[1].deliver()
    assert names_of(again.posted) == [{names[3]}]
    again.settle()
    assert kept(again) == [{names[3]}] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_that_is_not_open_yet_removes_nothing_elsewhere(ranks: Ranks, rank: int) -> None:
    names = {block.header.hash for block in ranks.stored()}
    again = reopened(ranks)
    closed, other = (again.own, again.one.tier) if rank == 0 else (again.one.tier, again.own)
    closed.kept.clear()
    again.own.open()
    again.one.tier.open()
    again.one.deliver()
    assert names_of(again.posted) == [set()]
    again.settle()
    assert set(other.kept) == names


def test_what_is_stored_before_all_have_said_what_they_have_is_known_afterwards() -> None:
    ranks = Ranks()
    ranks.own.open()
    ranks.store(0)
    ranks.one.obey()
    while ranks.own.step():
        pass
    ranks.one.tier.open()
    ranks.one.deliver()
    assert names_of(ranks.posted)[-1] == {chain_of(0, 3)[0].header.hash}
    ranks.settle()
    assert len(ranks.own.kept) == len(ranks.one.tier.kept) == 1


def test_what_has_left_before_all_have_said_what_they_have_is_gone() -> None:
    before = Ranks()
    before.open()
    names = [block.header.hash for block in before.stored()]
    ranks = reopened(before)
    ranks.own.open()
    ranks.own.delete((names[0],))
    while ranks.own.step():
        pass
    ranks.one.tier.open()
    ranks.one.deliver()
    assert names_of(ranks.posted) == [set(names[1:])]


def test_what_was_learned_of_speed_is_rank_0s() -> None:
    ranks = Ranks()
    assert ranks.leader.keep_rates(RATES)
    assert (ranks.own.rates, ranks.one.tier.rates) == (RATES, None)
    ranks.own.open()
    ranks.one.tier.open()
    ranks.one.deliver()
    assert [each.rates for each in ranks.posted if isinstance(each, Inventory)] == [RATES]


def test_a_second_inventory_is_passed_on(ranks: Ranks) -> None:
    names = {block.header.hash for block in ranks.stored()}
    ranks.own.open()
    assert names_of(ranks.posted) == [names]


@pytest.mark.parametrize("has_pages", [True, False])
@pytest.mark.parametrize("is_own_first", [True, False])
def test_a_read_ends_when_all_ranks_have_ended_it(ranks: Ranks, has_pages: bool, is_own_first: bool) -> None:
    chain = ranks.stored()
    ticket = ranks.read(chain, has_pages=has_pages)
    steps = [ranks.own.step, lambda: (ranks.one.obey(), ranks.one.work(), ranks.one.deliver())]
    first, second = steps if is_own_first else reversed(steps)
    first()
    assert ticket.outcome is None and ticket not in ranks.posted
    second()
    assert ranks.posted == [ticket]
    loaded = ticket.outcome
    assert isinstance(loaded, BlocksLoaded) and loaded.failure is None
    assert_holds(loaded, chain)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("is_own_first", [True, False])
def test_a_block_that_a_rank_lacks_ends_the_read_there_and_goes_everywhere(
    ranks: Ranks, place: int, is_own_first: bool
) -> None:
    chain = ranks.stored()
    name = chain[place].header.hash
    del ranks.one.tier.kept[name]
    ticket = ranks.read(chain)
    if is_own_first:
        ranks.own.step()
    posted = ranks.settle()
    failure = failure_of(ticket)
    assert (failure.cause, failure.hash) == (BlockDamage.MISSING, name)
    if place:
        assert isinstance(ticket.outcome, BlocksLoaded)
        assert [block.header for block in ticket.outcome.blocks] == [b.header for b in chain[:place]]
    else:
        assert isinstance(ticket.outcome, StorageFailure), "nothing of the chain's beginning is there"
    assert name in evicted(posted)
    assert all(name not in names for names in kept(ranks))


def test_the_first_block_that_any_rank_lacks_counts() -> None:
    ranks = Ranks(3)
    ranks.open()
    chain = ranks.stored()
    del ranks.followers[0].tier.kept[chain[2].header.hash]
    del ranks.followers[1].tier.kept[chain[1].header.hash]
    ticket = ranks.read(chain)
    ranks.settle()
    assert failure_of(ticket).hash == chain[1].header.hash


def test_a_rank_without_pages_blames_no_block(ranks: Ranks) -> None:
    chain = ranks.stored()
    ranks.one.runner.blocks.has_pages = False
    ticket = ranks.read(chain, has_pages=True)
    ranks.settle()
    failure = failure_of(ticket)
    assert (failure.cause, failure.hash) == (BlockDamage.MEMORY, None)
    assert kept(ranks) == [{block.header.hash for block in chain}] * 2


def test_where_all_fail_rank_0_says_why(ranks: Ranks) -> None:
    chain = ranks.stored()
    name = chain[0].header.hash
    ranks.own.damage(name)
    ranks.one.tier.damage(name)
    ticket = ranks.read(chain)
    ranks.settle()
    assert failure_of(ticket).cause is BlockDamage.CHECKSUM
    assert all(name not in names for names in kept(ranks))


def test_a_block_that_a_rank_could_not_store_goes_everywhere(ranks: Ranks) -> None:
    ranks.one.tier.takes_blocks = False
    ranks.store(0)
    posted = ranks.settle()
    name = chain_of(0, 3)[0].header.hash
    assert any(isinstance(each, Ticket) and isinstance(each.outcome, BlockPersisted) for each in posted)
    assert name in evicted(posted) and kept(ranks) == [set(), set()]


def test_a_block_that_a_full_rank_evicts_goes_everywhere(ranks: Ranks) -> None:
    name = ranks.stored()[2].header.hash
    ranks.one.follower.take(BlocksEvicted((name,)))
    ranks.one.deliver()
    assert name in evicted(ranks.settle())
    assert name not in ranks.own.kept


def test_an_abandoned_read_keeps_nothing_on_any_rank(ranks: Ranks) -> None:
    chain = ranks.stored()
    ranks.one.tier.hangs = True
    ticket = ranks.read(chain, has_pages=True)
    ranks.one.obey()
    while ranks.own.step():
        pass
    ranks.leader.abandon(ticket)
    del ticket
    ranks.leader.touch(())
    assert [order.WhichOneof("order") for order in ranks.one.obey()] == ["drop", "mark"]
    ranks.one.tier.hangs = False
    ranks.settle()
    assert not held_of(ranks), "what was abandoned is kept"


def test_what_came_of_an_abandoned_read_is_nobodys_ticket(ranks: Ranks) -> None:
    ticket = ranks.read(ranks.stored())
    ranks.leader.abandon(ticket)
    assert ticket not in ranks.settle() and ticket.outcome is None


def test_a_read_that_hangs_on_a_follower_is_silent(ranks: Ranks) -> None:
    chain = ranks.stored()
    ranks.one.tier.hangs = True
    ticket = ranks.read(chain)
    ranks.one.obey()
    while ranks.own.step():
        pass
    assert ranks.leader.silence_s(ticket) == 0.0
    ranks.one.tier.silence_s = lambda ticket: 4.0  # type: ignore[method-assign]
    ranks.one.reported.append(ranks.one.follower.heartbeat())
    ranks.one.deliver()
    assert ranks.leader.silence_s(ticket) == 4.0
    ranks.one.tier.hangs = False
    ranks.settle()
    assert ranks.leader.silence_s(ticket) == 0.0, "it has ended"


def test_a_tier_that_hangs_on_a_follower_hangs(ranks: Ranks) -> None:
    ranks.one.tier.hung_read_count = 2
    ranks.one.tier.stall_s = 7.0
    ranks.one.reported.append(ranks.one.follower.heartbeat())
    ranks.one.deliver()
    assert (ranks.leader.hung_read_count, ranks.leader.stall_s) == (2, 7.0)
    ranks.one.tier.hung_read_count = 0
    ranks.one.tier.stall_s = 0.0
    ranks.one.reported.append(ranks.one.follower.heartbeat())
    ranks.one.deliver()
    assert (ranks.leader.hung_read_count, ranks.leader.stall_s) == (0, 0.0)


def test_the_log_names_the_rank_whose_disk_hangs_once(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    def beat(*, hung_read_count: int = 0, stall_s: float = 0.0) -> list[str]:
        caplog.clear()
        ranks.one.tier.hung_read_count, ranks.one.tier.stall_s = hung_read_count, stall_s
        ranks.one.reported.append(ranks.one.follower.heartbeat())
        ranks.one.deliver()
        facts = [vars(record) for record in caplog.records]
        return [f"{each['msg']} {each['rank']} {each.get('detail', '')}" for each in facts]

    assert beat(stall_s=0.5) == []
    assert beat(hung_read_count=2) == ["rank_ssd_hangs 1 2 reads hang"]
    assert beat(hung_read_count=1) == []
    with caplog.at_level("WARNING"):
        assert beat() == ["rank_ssd_answers_again 1 "]
    assert beat(stall_s=60.0) == ["rank_ssd_hangs 1 its storage thread hangs"]


@pytest.mark.parametrize(("own", "theirs", "known"), [(5e8, 2e9, 5e8), (2e9, 5e8, 5e8), (2e9, 0.0, 2e9)])
def test_a_read_is_as_fast_as_on_the_slowest_rank(
    ranks: Ranks, own: float, theirs: float, known: float
) -> None:
    ranks.own.read_bytes_per_s, ranks.one.tier.read_bytes_per_s = own, theirs
    ticket = ranks.read(ranks.stored())
    ranks.settle()
    assert isinstance(ticket.outcome, BlocksLoaded) and ticket.outcome.read_bytes_per_s == known


def test_a_rank_that_lists_blocks_without_end_is_not_listened_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_tier, "_NAMES_LIMIT", 10)
    ranks = Ranks()
    with pytest.raises(ValueError, match="rank 1 lists more than 10 blocks"):
        for number in range(11):
            names = [number.to_bytes(32, "big")]
            ranks.leader.report(1, group.FollowRequest(stored=group.Stored(names=names)))


def test_a_tier_that_is_gone_on_a_follower_is_gone(ranks: Ranks) -> None:
    ticket = ranks.read(ranks.stored())
    ranks.one.follower.take(StorageFailed("the disk broke"))
    ranks.one.deliver()
    assert ranks.posted == [StorageFailed("rank 1: the disk broke")]
    ranks.posted.clear()
    assert ranks.settle() == [] and ticket.outcome is None, "nothing follows"


def test_what_rank_0_could_not_take_is_ordered_nowhere(ranks: Ranks) -> None:
    names = tuple(block.header.hash for block in ranks.stored())
    ranks.own.hangs = True
    while ranks.own.names(block_limit=1) is not None:
        pass
    leader = ranks.leader
    assert leader.delete(names) is None and leader.pin(names, 5.0) is None and leader.verify(names) is None
    assert not (leader.touch(names) or leader.demote(names) or leader.keep_rates(RATES))
    assert ranks.one.obey() == []


@pytest.mark.parametrize("is_final", [True, False])
def test_what_is_deleted_goes_everywhere(ranks: Ranks, is_final: bool) -> None:
    chain = ranks.stored()
    ranks.leader.delete(tuple(block.header.hash for block in chain), is_final=is_final)
    ranks.settle()
    assert kept(ranks) == [set(), set()]
    assert all(report.WhichOneof("report") != "lost" for report in ranks.one.reported)


def test_what_a_follower_has_no_room_for_is_removed_and_pinned_later(ranks: Ranks) -> None:
    names = tuple(block.header.hash for block in ranks.stored())
    ranks.one.tier.hangs = True
    while ranks.one.tier.names(block_limit=1) is not None:
        pass
    ranks.leader.delete(names[1:])
    ranks.leader.pin(names[:1], 2e9)
    ranks.one.obey()
    ranks.one.tier.hangs = False
    ranks.one.work()
    assert set(ranks.one.tier.kept) == set(names), "there was no room for the orders"
    ranks.leader.touch(names[:1])
    ranks.settle()
    assert kept(ranks) == [{names[0]}] * 2
    assert ranks.one.tier.kept[names[0]].pin_end_time == 2e9


def test_pins_hold_on_all_ranks(ranks: Ranks) -> None:
    name = ranks.stored()[0].header.hash
    ranks.leader.pin((name,), 2e9)
    ranks.settle()
    assert [tier.kept[name].pin_end_time for tier in (ranks.own, ranks.one.tier)] == [2e9, 2e9]


@pytest.mark.parametrize("names_them", [True, False])
def test_a_block_that_is_damaged_on_a_follower_is_found_by_verifying(ranks: Ranks, names_them: bool) -> None:
    names = tuple(block.header.hash for block in ranks.stored())
    ranks.one.tier.damage(names[1])
    ranks.leader.verify(names if names_them else None)
    posted = ranks.settle()
    assert evicted(posted) == {names[1]}
    assert kept(ranks) == [{names[0], names[2]}] * 2


def failure_of(ticket: AnyTicket) -> StorageFailure:
    outcome: Any = ticket.outcome
    failure = outcome if isinstance(outcome, StorageFailure) else outcome.failure
    assert isinstance(failure, StorageFailure)
    return failure


def held_of(ranks: Ranks) -> list[object]:
    """Return what rank 0 and its follower keep of reads."""
    leader, follower = ranks.leader, ranks.one.follower
    return [
        *leader._reads.values(),
        *leader._reads_by_own.values(),
        *leader._reads_by_whole.values(),
        *follower._kept.values(),
        *follower._read_numbers.values(),
    ]


def test_a_follower_keeps_nothing_of_what_is_over(ranks: Ranks) -> None:
    chain = ranks.stored()
    ranks.read(chain, has_pages=True)
    ranks.settle()
    ranks.leader.delete(tuple(block.header.hash for block in chain))
    ranks.leader.delete(tuple(block.header.hash for block in chain))
    ranks.settle()
    ranks.log.add(group.Order(mark=group.Mark(what="touch")))
    ranks.settle()
    follower = ranks.one.follower
    assert not held_of(ranks) and not follower._puts and not follower._removed
