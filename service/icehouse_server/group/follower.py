"""Follower: repeats on its rank what rank 0's engine does, order by order (inference thread).

It decides nothing. What it keeps (regions, copies, reads) has rank 0's numbers. Its blocks are in its own SSD
tier under rank 0's names, with its own fingerprint.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockDamage, HostBlock, Region, RegionKind
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import BlockHash, Fingerprint, SequenceId
from icehouse_server.domain.stats import RankTierStats
from icehouse_server.engine.core.refusals import rank_lost
from icehouse_server.engine.prefix_cache.tiers.runner_port import HostCopy, PlacedBlock, RestoreInput
from icehouse_server.engine.runner.runner import ModelRunner
from icehouse_server.group.messages import chunk_from, header_from, names_from, planned_from, tier_report
from icehouse_server.group.silence import BEAT_S
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    BlocksEvicted,
    BlocksLoaded,
    ColdTier,
    Inventory,
    KvTarget,
    Outcome,
    PlannedBlock,
    StorageFailed,
    StorageFailure,
    StorageTrouble,
    Ticket,
    hang_detail,
)

_log = logging.getLogger("icehouse.engine")

_NAMES_AT_ONCE = 4096
_CLOSE_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    blocks: Sequence[PlannedBlock]
    place: KvTarget | None
    ticket: Ticket[BlocksLoaded]


class Follower:
    """One rank other than the first. `tier` must be made with `take` as its callback."""

    tier: ColdTier | None = None

    def __init__(
        self,
        runner: ModelRunner,
        *,
        fingerprint: Fingerprint,
        clock: Clock,
        report: Callable[[group.FollowRequest], object],
    ) -> None:
        """`report` queues a report on the channel; any thread."""
        self._runner = runner
        self._fingerprint = fingerprint
        self._clock = clock
        self._report = report
        self._kept: dict[int, Region | HostCopy | _Read] = {}
        self._read_numbers: dict[Ticket[Any], int] = {}
        self._puts: dict[Ticket[Any], BlockHash] = {}
        self._removed: set[BlockHash] = set()
        """Removed by order: rank 0 need not be told that they are gone."""
        self._removals: dict[Ticket[Any], Sequence[BlockHash]] = {}
        self._postponed: collections.deque[group.Mark] = collections.deque()
        """Removals and pins for which the tier had no room."""
        self.pass_count = 0
        self._is_loaded = False
        self.has_ended = False
        self._order_count = 0
        """Orders carried out."""
        self._counted_time = -math.inf
        self._active_memory_bytes = 0
        self._asked: Ticket[CacheStats] | None = None
        """The pending question to the tier about its counters."""
        self._tier_stats: RankTierStats | None = None
        self._refused_count = 0
        """Blocks for which the tier's queue had no room."""
        self._tier_trouble = ""
        """Why the tier writes nothing, by its last answer."""

    def open(self) -> None:
        """Open the SSD tier, before rank 0 hears from this rank. Raises StartError."""
        if self.tier is None:
            self._stored([], is_last=True)
        else:
            self.tier.start()

    def load(self, *, memory_limit_bytes: int) -> None:
        """Load this rank's share of the model within the memory that any rank may use; all ranks load at
        once. Raises ModelError."""
        self._is_loaded = True
        self._runner.limit_memory(memory_limit_bytes)
        for _ in self._runner.load_steps(is_hurried=lambda: False):
            pass
        self._order_count += 1
        self.count()

    def carry_out(self, order: group.Order) -> None:
        """Do what rank 0 did. Raises Unavailable if this rank's state differs from rank 0's."""
        kind = order.WhichOneof("order")
        assert kind is not None, "rank 0 is of another release"
        if self._postponed and self.tier is not None:
            self._catch_up(self.tier)
        getattr(self, f"_do_{kind}")(getattr(order, kind))
        self._order_count += 1
        self.count()

    def count(self) -> None:
        """Update what `heartbeat` says about this rank's memory and its tier, at most once per beat."""
        now = self._clock.monotonic()
        if not self._order_count or self.has_ended or now - self._counted_time < BEAT_S:
            return
        self._counted_time = now
        self._active_memory_bytes = self._runner.memory().active_bytes
        if self.tier is not None and (self._asked is None or self._asked.outcome is not None):
            self._asked = self.tier.stats()

    def _do_open(self, order: group.Open) -> None:
        self._runner.open(SequenceId(order.sequence_id))

    def _do_run(self, order: group.Run) -> None:
        if order.number != self.pass_count or order.digest != self._runner.digest():
            raise rank_lost(f"this rank disagrees with rank 0 about pass {order.number}")
        self.pass_count += 1
        self._runner.run([chunk_from(chunk) for chunk in order.chunks], reads_at_once=order.reads_at_once)

    def _do_release(self, order: group.Release) -> None:
        self._runner.release([SequenceId(each) for each in order.sequence_ids])

    def _do_warm_up(self, order: group.WarmUp) -> None:
        self._runner.warm_up_more()

    def _do_cut(self, order: group.Cut) -> None:
        regions = self._runner.blocks.cut(
            SequenceId(order.sequence_id),
            start=order.start,
            stop=order.stop,
            kinds=[RegionKind(each.kind) for each in order.kept],
        )
        for each in order.kept:
            self._kept[each.number] = regions[RegionKind(each.kind)]

    def _do_drop(self, order: group.Drop) -> None:
        for number in order.numbers:
            dropped = self._kept.pop(number, None)
            if isinstance(dropped, _Read):
                self._read_numbers.pop(dropped.ticket, None)
                if self.tier is not None and dropped.ticket.outcome is None:
                    self.tier.abandon(dropped.ticket)

    def _do_begin_load(self, order: group.BeginLoad) -> None:
        blocks = planned_from(order.blocks, self._fingerprint)
        place = None
        if order.has_pages:
            place = self._runner.blocks.begin_load([each for each in blocks if RegionKind.KV in each.regions])
        ticket = None
        if self.tier is not None and (place is not None or not order.has_pages):
            ticket = self.tier.get_into(blocks, place)
        if ticket is None:
            self._load_ended(order.load, 0, lacks_memory=True)
            return
        self._kept[order.load] = _Read(blocks, place, ticket)
        self._read_numbers[ticket] = order.load
        if ticket.outcome is not None:
            self._read_ended(ticket)

    def _do_end_load(self, order: group.EndLoad) -> None:
        read = self._kept[order.load]
        assert isinstance(read, _Read) and read.place is not None
        regions = self._runner.blocks.end_load(read.place)
        self._kept.update(zip(order.numbers, regions, strict=True))

    def _do_from_host(self, order: group.FromHost) -> None:
        read = self._kept[order.load]
        assert isinstance(read, _Read) and isinstance(read.ticket.outcome, BlocksLoaded)
        block = next(each for each in read.ticket.outcome.blocks if each.header.hash == order.hash)
        region = next(each for each in block.regions if each.kind == order.kept.kind)
        self._kept[order.kept.number] = self._runner.blocks.from_host(region)

    def _do_restore(self, order: group.Restore) -> None:
        blocks = tuple(
            PlacedBlock(
                each.start_token_index,
                each.token_count,
                {RegionKind(region.kind): self._region(region.number) for region in each.regions},
            )
            for each in order.blocks
        )
        sequence_id, restore = SequenceId(order.sequence_id), RestoreInput(blocks, order.token_count)
        self._runner.blocks.begin_restore(sequence_id, restore)
        while not self._runner.blocks.continue_restore(sequence_id, budget_s=1.0):
            pass

    def _do_to_host(self, order: group.ToHost) -> None:
        regions = [self._region(number) for number in order.numbers]
        self._kept[order.copy] = self._runner.blocks.begin_to_host(regions)

    def _do_put(self, order: group.Put) -> None:
        header = header_from(order.header, self._fingerprint)
        copy: Any = self._kept[order.copy]
        block = HostBlock(header, copy.take())
        if self.tier is None or self.tier.queue_space_bytes < block.size_bytes + OVERHEAD_BYTES:
            self._refused_count += 1
            self._lost([header.hash])
            return
        self._removed.discard(header.hash)
        ticket = self.tier.put(block, pin_end_time=order.pin_end_time)
        self._puts[ticket] = header.hash
        if ticket.outcome is not None:
            self._ticket_came(ticket)

    def _do_mark(self, order: group.Mark) -> None:
        if self.tier is None:
            return
        names = names_from(order.names)
        if order.what == "touch":
            self.tier.touch(names)
        elif order.what == "demote":
            self.tier.demote(names)
        elif order.what in ("verify", "verify_all"):
            self.tier.verify(None if order.what == "verify_all" else names)
        else:
            self._postponed.append(order)
            self._catch_up(self.tier)

    def _catch_up(self, tier: ColdTier) -> None:
        """Pin and remove as far as the tier has room: neither may be forgotten."""
        while self._postponed:
            mark = self._postponed[0]
            names = names_from(mark.names)
            if mark.what == "pin":
                ticket: Ticket[Any] | None = tier.pin(names, mark.end_time)
            else:
                self._removed.update(names)
                ticket = tier.delete(names, is_final=mark.what == "delete_final")
                if ticket is not None:
                    self._removals[ticket] = names
                    if ticket.outcome is not None:
                        self._removal_ended(ticket)
            if ticket is None:
                return
            self._postponed.popleft()

    def _do_end(self, order: group.End) -> None:
        self._kept.clear()
        if self._is_loaded:
            self._runner.close()
        if self.tier is not None:
            self.tier.close(deadline_time=self._clock.monotonic() + _CLOSE_S)
        self.has_ended = True

    def _region(self, number: int) -> Region:
        return cast("Region", self._kept[number])

    def take(self, outcome: Outcome) -> None:
        """Handle what the tier posts. Any thread."""
        if isinstance(outcome, Inventory):
            self._stored([record.hash for record in outcome.records], is_last=outcome.is_last)
        elif isinstance(outcome, BlocksEvicted):
            self._lost([name for name in outcome.hashes if name not in self._removed])
        elif isinstance(outcome, StorageFailed):
            # The reason may name folders, so only the log has it.
            self._tier_trouble = "it is gone until the next start, and the log says why"
            self._report(group.FollowRequest(tier_lost=group.TierLost(detail=outcome.error)))
        elif isinstance(outcome, Ticket) and isinstance(outcome.outcome, CacheStats):
            self._tier_stats = RankTierStats.of(outcome.outcome)
            self._tier_trouble = outcome.outcome.disk.writes_off_detail if outcome.outcome.disk else ""
        elif isinstance(outcome, Ticket):
            self._ticket_came(outcome)
            self._removal_ended(outcome)

    def heartbeat(self) -> group.FollowRequest:
        """Return a heartbeat: this rank is alive, and how it and its tier are. Any thread."""
        beat = group.Heartbeat()
        beat.rank.order_total, beat.rank.active_memory_bytes = self._order_count, self._active_memory_bytes
        if self.tier is not None:
            beat.rank.ssd_trouble = hang_detail(self.tier) or self._tier_trouble
            if self._tier_stats is not None:
                beat.rank.ssd.CopyFrom(tier_report(self._tier_stats))
                beat.rank.ssd.dropped_block_total += self._refused_count
            beat.hung_read_count, beat.stall_s = self.tier.hung_read_count, self.tier.stall_s
            for ticket, number in list(self._read_numbers.items()):
                beat.silences.add(load=number, silent_s=self.tier.silence_s(ticket))
        return group.FollowRequest(heartbeat=beat)

    def _removal_ended(self, ticket: Ticket[Any]) -> None:
        # `BlocksEvicted` has named the blocks before; those that were not there are never named.
        self._removed.difference_update(self._removals.pop(ticket, ()))

    def _ticket_came(self, ticket: Ticket[Any]) -> None:
        name = self._puts.pop(ticket, None)
        if name is not None and isinstance(ticket.outcome, StorageFailure):
            self._lost([name])
        self._read_ended(ticket)

    def _read_ended(self, ticket: Ticket[Any]) -> None:
        number = self._read_numbers.pop(ticket, None)
        read = None if number is None else self._kept.get(number)
        if number is None or not isinstance(read, _Read):
            return
        outcome = cast("BlocksLoaded | StorageFailure", ticket.outcome)
        failure = outcome if isinstance(outcome, StorageFailure) else outcome.failure
        if isinstance(outcome, BlocksLoaded) and failure is None:
            self._load_ended(number, len(read.blocks), read_bytes_per_s=outcome.read_bytes_per_s)
            return
        assert failure is not None
        names = [each.header.hash for each in read.blocks]
        at = names.index(failure.hash) if failure.hash in names else 0
        is_there = failure.hash is None or failure.cause in (BlockDamage.MEMORY, *StorageTrouble)
        self._load_ended(number, at, lacks_memory=is_there)

    def _load_ended(
        self, number: int, block_count: int, *, lacks_memory: bool = False, read_bytes_per_s: float = 0.0
    ) -> None:
        ended = group.LoadEnded(
            load=number,
            block_count=block_count,
            lacks_memory=lacks_memory,
            read_bytes_per_s=read_bytes_per_s,
        )
        self._report(group.FollowRequest(load_ended=ended))

    def _stored(self, names: Sequence[BlockHash], *, is_last: bool) -> None:
        for first in range(0, max(1, len(names)), _NAMES_AT_ONCE):
            part = names[first : first + _NAMES_AT_ONCE]
            ends = is_last and first + _NAMES_AT_ONCE >= len(names)
            self._report(group.FollowRequest(stored=group.Stored(names=part, is_last=ends)))

    def _lost(self, names: Sequence[BlockHash]) -> None:
        for first in range(0, len(names), _NAMES_AT_ONCE):
            lost = group.Lost(names=names[first : first + _NAMES_AT_ONCE])
            self._report(group.FollowRequest(lost=lost))
