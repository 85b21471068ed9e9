"""Ranks of a group in one process: rank 0's tier, and followers with a runner that a test tells what to keep.

What crosses is what crosses on the wire. A follower does nothing, and a tier nothing, before it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from icehouse.group.v1 import group_service_pb2 as group
from icehouse_server.domain.blocks import HostBlock, HostRegion
from icehouse_server.domain.ids import Fingerprint
from icehouse_server.engine.core.ports import MemoryUse
from icehouse_server.group.follower import Follower
from icehouse_server.group.leader_runner import GroupCopy
from icehouse_server.group.leader_tier import LeaderTier
from icehouse_server.group.order_log import CopiedRegion, GroupRead, GroupTarget, OrderLog
from icehouse_server.storage.api import AnyTicket, BlocksEvicted, Inventory, Outcome, PlannedBlock

from tests.fixtures.storage.blocks import FINGERPRINT, OTHER_FINGERPRINT, make_chain
from tests.fixtures.storage.loading import BlockBuffers
from tests.fixtures.storage.memory_tier import MemoryTier
from tests.fixtures.storage.storage_thread import ManualClock


class Copy:
    """A HostCopy of what it is given."""

    is_done = is_apart = True

    def __init__(self, regions: tuple[HostRegion, ...]) -> None:
        self._regions = regions

    def take(self) -> tuple[HostRegion, ...]:
        return self._regions


class ScriptedBlocks:
    """A CacheRunner of which a test says what comes."""

    def __init__(self) -> None:
        self.has_pages = True
        self.coming: tuple[HostRegion, ...] = ()
        """What the next copy to host memory is of."""

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> BlockBuffers | None:
        return BlockBuffers(blocks) if self.has_pages else None

    def end_load(self, place: BlockBuffers) -> list[HostRegion]:
        return place.regions()

    def from_host(self, region: HostRegion) -> HostRegion:
        return region

    def begin_to_host(self, regions: Sequence[object]) -> Copy:
        return Copy(self.coming)


class ScriptedRunner:
    """A follower's runner without a model."""

    def __init__(self) -> None:
        self.blocks: Any = ScriptedBlocks()
        self.is_closed = False
        self.active_bytes = 0

    def memory(self) -> MemoryUse:
        return MemoryUse(self.active_bytes, self.active_bytes)

    def close(self) -> None:
        self.is_closed = True


class FollowingRank:
    """A follower with a tier of its own."""

    def __init__(self, rank: int, log: OrderLog, leader: LeaderTier, clock: ManualClock) -> None:
        self.rank = rank
        self._log = log
        self._leader = leader
        self._sequence = 0
        self.reported: list[group.FollowRequest] = []
        """All that it has reported; `deliver` brings it to rank 0."""
        self._delivered_count = 0
        self.runner: Any = ScriptedRunner()
        self.follower = Follower(
            self.runner, fingerprint=fingerprint_of(rank), clock=clock, report=self.reported.append
        )
        self.tier = MemoryTier(clock=clock, post=self.follower.take)
        self.follower.tier = self.tier

    def obey(self) -> list[group.Order]:
        """Carry out all that was ordered, and return it."""
        done: list[group.Order] = []
        while (response := self._log.take(self.rank, self._sequence, timeout_s=0)) is not None:
            assert response.sequence == self._sequence
            self._sequence += len(response.orders)
            for order in response.orders:
                self.follower.carry_out(order)
            done += response.orders
        return done

    def deliver(self) -> None:
        """Bring rank 0 what was reported."""
        reports = self.reported[self._delivered_count :]
        self._delivered_count += len(reports)
        for report in reports:
            self._leader.report(self.rank, report)

    def work(self) -> None:
        """Have the tier do all that it was asked."""
        while self.tier.step():
            pass


class Ranks:
    """Rank 0's tier over one in memory, and followers."""

    def __init__(self, world: int = 2) -> None:
        self.clock = ManualClock()
        self.log = OrderLog(world)
        self.posted: list[Outcome] = []
        """What the engine got."""
        self.leader = LeaderTier(self.log, followers=range(1, world), post=self.posted.append)
        self.own = MemoryTier(clock=self.clock, post=self.leader.take)
        self.leader.own = self.own
        self.followers = [FollowingRank(rank, self.log, self.leader, self.clock) for rank in range(1, world)]

    @property
    def one(self) -> FollowingRank:
        """The first follower."""
        return self.followers[0]

    def open(self) -> None:
        """Open all tiers, and have the inventory posted."""
        self.own.open()
        for each in self.followers:
            each.tier.open()
            each.deliver()
        self.posted.clear()

    def settle(self) -> list[Outcome]:
        """Do all that was asked; return what was posted since the last call."""
        is_busy = True
        while is_busy:
            is_busy = self.own.step()
            for each in self.followers:
                is_busy |= bool(each.obey()) | each.tier.step()
                each.deliver()
        posted = self.posted[:]
        self.posted.clear()
        return posted

    def store(self, place: int, count: int = 3, *, seed: int = 1) -> None:
        """Order the block at this place of a chain stored on all ranks, each its own part."""
        copy = GroupCopy(self.log, Copy(()))
        block = chain_of(0, count, seed=seed)[place]
        regions = tuple(CopiedRegion(each.kind, each.tensors, copy) for each in block.regions)
        self.log.add(group.Order(to_host=group.ToHost(copy=copy.number)))
        for each in self.followers:
            each.runner.blocks.coming = chain_of(each.rank, count, seed=seed)[place].regions
            each.obey()
        self.leader.put(HostBlock(block.header, regions))

    def stored(self, count: int = 3, *, seed: int = 1) -> list[HostBlock]:
        """Have a chain stored on all ranks, and return rank 0's part."""
        for place in range(count):
            self.store(place, count, seed=seed)
        self.settle()
        return chain_of(0, count, seed=seed)

    def read(self, blocks: Sequence[HostBlock], *, has_pages: bool = False) -> AnyTicket:
        """Order blocks read on all ranks."""
        planned = tuple(
            PlannedBlock(block.header, frozenset(region.kind for region in block.regions)) for block in blocks
        )
        into = GroupTarget(BlockBuffers(planned), GroupRead(self.log)) if has_pages else None
        ticket = self.leader.get_into(planned, into)
        assert ticket is not None
        return ticket


def fingerprint_of(rank: int) -> Fingerprint:
    """Return what a rank's blocks are filed under."""
    return FINGERPRINT if rank == 0 else OTHER_FINGERPRINT


def chain_of(rank: int, count: int, *, seed: int = 1) -> list[HostBlock]:
    """Return a rank's part of a chain: the names of rank 0, bytes of its own."""
    names = make_chain(count, seed=seed)
    parts = make_chain(count, seed=seed + 50 * rank)
    chain = []
    for name, part in zip(names, parts, strict=True):
        header = name.header
        header = type(header)(
            hash=header.hash,
            parent=header.parent,
            fingerprint=fingerprint_of(rank),
            start_token_index=header.start_token_index,
            token_ids=header.token_ids,
            block_token_limit=header.block_token_limit,
        )
        chain.append(HostBlock(header, part.regions))
    return chain


def names_of(outcomes: Sequence[Outcome]) -> list[set[bytes]]:
    """Return the names of each inventory."""
    return [{r.hash for r in each.records} for each in outcomes if isinstance(each, Inventory)]


def evicted(outcomes: Sequence[Outcome]) -> set[bytes]:
    """Return the names of blocks that left."""
    return {name for each in outcomes if isinstance(each, BlocksEvicted) for name in each.hashes}
