"""Leader tier: the SSD tiers of all ranks as one (engine's, storage's and the channel's threads).

Each rank stores its part of a block under the same name, in its own directory. Rank 0's manifest is what the
engine knows. Blocks that some rank lacks are removed from it: at the start by comparing names, later when a
read ends. So a rank that lost its directory costs recomputation, never wrong text. A tier that hangs or is
gone on one rank counts as hanging or gone on all.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence, Set

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.domain.blocks import BlockDamage, BlockHeader, HostBlock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.group.messages import header_message, names_from, planned_messages
from icehouse_server.group.order_log import CopiedRegion, GroupRead, GroupTarget, OrderLog, ReadRegion
from icehouse_server.pins import NOT_PINNED
from icehouse_server.storage.api import (
    STALL_LIMIT_S,
    AnyTicket,
    BlockPersisted,
    BlocksEvicted,
    BlocksLoaded,
    BlocksPurged,
    ChainFound,
    ColdTier,
    Fetched,
    Inventory,
    KvTarget,
    LearnedRates,
    LoadedBlock,
    Names,
    Outcome,
    PlannedBlock,
    StorageFailed,
    StorageFailure,
    StoredBlock,
    Ticket,
    Verified,
    WriteBudget,
)

_log = logging.getLogger("icehouse.engine")

_NAMES_AT_ONCE = 4096
_NAMES_LIMIT = 1 << 21
"""Blocks that a follower may list: more than any disk holds for a model that a group serves."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Health:
    """The last reported state of a follower's tier."""

    silent_s: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """By number of its read."""
    hung_read_count: int = 0
    stall_s: float = 0.0

    @property
    def detail(self) -> str:
        """Which part of it does not answer; empty if all is well."""
        parts = [f"{self.hung_read_count} reads hang"] if self.hung_read_count else []
        if self.stall_s >= STALL_LIMIT_S:
            parts.append("its storage thread hangs")
        return "; ".join(parts)


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    """A read that ends when it has ended on all ranks."""

    read: GroupRead
    blocks: Sequence[PlannedBlock]
    own: Ticket[BlocksLoaded]
    whole: Ticket[BlocksLoaded]
    waiting: set[int]
    """Followers that are still reading."""
    has_own: bool = False
    missing: StorageFailure | None = None
    """For the first block that some follower lacks."""
    missing_at: int = 0
    slowest_bytes_per_s: float = math.inf
    """The read rate of the slowest follower, as far as it is known."""

    @property
    def is_done(self) -> bool:
        return self.has_own and not self.waiting


class LeaderTier:
    """Implements ColdTier. `own` is rank 0's tier, made with `take` as callback; set it before `start`."""

    own: ColdTier

    def __init__(self, log: OrderLog, *, followers: Sequence[int], post: Callable[[Outcome], object]) -> None:
        self._log = log
        self._followers = frozenset(followers)
        self._post = post
        self._lock = threading.Lock()
        self._reads: dict[int, _Read] = {}
        self._reads_by_own: dict[AnyTicket, _Read] = {}
        self._reads_by_whole: dict[AnyTicket, _Read] = {}
        self._stored: dict[int, set[BlockHash]] = {rank: set() for rank in followers}
        self._unlisted = set(followers)
        """Followers that have not listed their blocks yet."""
        self._held_back: list[Inventory] = []
        """Rank 0's inventory, until all have."""
        self._come: dict[BlockHash, StoredBlock] = {}
        """Blocks that were stored since the inventory."""
        self._gone: set[BlockHash] = set()
        """Blocks that left since the inventory."""
        self._health = dict.fromkeys(followers, _Health())
        self._is_lost = False
        """Whether some follower's tier is gone for good."""

    def take(self, outcome: Outcome) -> None:
        """Handle what rank 0's tier posts. Any thread."""
        with self._lock:
            for each in self._taken(outcome):
                self._post(each)

    def _taken(self, outcome: Outcome) -> list[Outcome]:
        if self._is_lost:
            return []
        read = self._reads_by_own.pop(outcome, None) if isinstance(outcome, Ticket) else None
        if read is not None:
            read.has_own = True
            return self._ended(read)
        if self._unlisted or self._held_back:
            if isinstance(outcome, Inventory):
                self._held_back.append(outcome)
                return self._listed()
            self._note_change(outcome)
        return [outcome]

    def _note_change(self, outcome: Outcome) -> None:
        """Note what was added and removed after the inventory, because it replaces what the engine knows."""
        if isinstance(outcome, BlocksEvicted):
            self._gone.update(outcome.hashes)
            for name in outcome.hashes:
                self._come.pop(name, None)
        elif isinstance(outcome, Ticket) and isinstance(outcome.outcome, BlockPersisted):
            record = outcome.outcome.record
            self._come[record.hash] = record
            self._gone.discard(record.hash)

    def report(self, rank: int, report: group.FollowRequest) -> None:
        """Handle a follower's report about its tier. The channel's threads."""
        with self._lock:
            for each in self._reported(rank, report):
                self._post(each)

    def _reported(self, rank: int, report: group.FollowRequest) -> list[Outcome]:
        kind = report.WhichOneof("report")
        if kind == "stored" and rank in self._unlisted:
            self._stored[rank].update(names_from(report.stored.names))
            if len(self._stored[rank]) > _NAMES_LIMIT:
                raise ValueError(f"rank {rank} lists more than {_NAMES_LIMIT} blocks")
            if report.stored.is_last:
                self._unlisted.remove(rank)
                return self._listed()
        elif kind == "load_ended":
            return self._load_ended(rank, report.load_ended)
        elif kind == "lost":
            self.delete(names_from(report.lost.names))
        elif kind == "heartbeat":
            beat = report.heartbeat
            silent_s = {each.load: each.silent_s for each in beat.silences}
            self._note_health(rank, _Health(silent_s, beat.hung_read_count, beat.stall_s))
        elif kind == "tier_lost" and not self._is_lost:
            self._is_lost = True
            return [StorageFailed(f"rank {rank}: {report.tier_lost.detail}")]
        return []

    def _note_health(self, rank: int, health: _Health) -> None:
        """Note the state of a follower's tier. The cache's report of a hanging disk names no rank, the log
        does."""
        had_trouble, self._health[rank] = bool(self._health[rank].detail), health
        if health.detail and not had_trouble:
            _log.error("rank_ssd_hangs", extra={"rank": rank, "detail": health.detail})
        elif had_trouble and not health.detail:
            _log.warning("rank_ssd_answers_again", extra={"rank": rank})

    def _listed(self) -> list[Outcome]:
        """Return rank 0's inventory, reduced to the blocks that all ranks have, once that is known."""
        parts = self._held_back
        if self._unlisted or not (parts and parts[-1].is_last):
            return []
        known = {record.hash for part in parts for record in part.records}
        common = known.intersection(*self._stored.values())
        if known and all(self._stored.values()):
            self._remove_all_but(common | self._come.keys(), known)
        # Otherwise some directory is new or not open yet: nothing is removed because of it.
        wanted = common - self._gone - self._come.keys()
        listed = [
            dataclasses.replace(part, records=tuple(r for r in part.records if r.hash in wanted))
            for part in parts
        ]
        listed[-1] = dataclasses.replace(listed[-1], records=(*listed[-1].records, *self._come.values()))
        self._stored = {rank: set() for rank in self._followers}
        self._held_back, self._come, self._gone = [], {}, set()
        return list(listed)

    def _remove_all_but(self, common: Set[BlockHash], known: Set[BlockHash]) -> None:
        """Remove blocks that some rank lacks from the ranks that have them; rank 0 has those in `known`."""
        if lacking := tuple(known - common):
            self.own.delete(lacking)
        theirs: list[BlockHash] = sorted(set().union(*self._stored.values()) - common)
        for first in range(0, len(theirs), _NAMES_AT_ONCE):
            self._mark("delete", tuple(theirs[first : first + _NAMES_AT_ONCE]))

    def _load_ended(self, rank: int, ended: group.LoadEnded) -> list[Outcome]:
        read = self._reads.get(ended.load)
        if read is None:
            return []
        read.waiting.discard(rank)
        if ended.read_bytes_per_s > 0.0:
            read.slowest_bytes_per_s = min(read.slowest_bytes_per_s, ended.read_bytes_per_s)
        if ended.block_count < len(read.blocks) and (
            read.missing is None or ended.block_count < read.missing_at
        ):
            name = read.blocks[ended.block_count].header.hash
            detail = f"rank {rank} does not have it"
            read.missing_at = ended.block_count
            read.missing = (
                StorageFailure(BlockDamage.MEMORY, detail)
                if ended.lacks_memory
                else StorageFailure(BlockDamage.MISSING, detail, hash=name)
            )
        return self._ended(read)

    def _ended(self, read: _Read) -> list[Outcome]:
        if not read.is_done:
            return []
        self._drop(read)
        outcome = read.own.outcome
        assert outcome is not None
        missing = read.missing
        if isinstance(outcome, BlocksLoaded) and outcome.failure is None:
            blocks = tuple(_remembered(block, read.read) for block in outcome.blocks)
            rate = min(outcome.read_bytes_per_s, read.slowest_bytes_per_s)
            outcome = dataclasses.replace(outcome, blocks=blocks, read_bytes_per_s=rate)
            if missing is not None and read.missing_at:
                outcome = dataclasses.replace(outcome, blocks=blocks[: read.missing_at], failure=missing)
            elif missing is not None:
                outcome = missing
        read.whole.finish(outcome)
        if missing is not None and missing.hash is not None:
            self.delete((missing.hash,))
        return [read.whole]

    def _drop(self, read: _Read) -> None:
        """Forget a read, so that the followers drop theirs once nobody else uses it."""
        del self._reads[read.read.number], self._reads_by_whole[read.whole]
        self._reads_by_own.pop(read.own, None)

    def _mark(self, what: str, names: Names, *, end_time: float = NOT_PINNED) -> None:
        self._log.add(group.Order(mark=group.Mark(what=what, names=names, end_time=end_time)))

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvTarget | None) -> Ticket[BlocksLoaded] | None:
        assert into is None or isinstance(into, GroupTarget)
        read = GroupRead(self._log) if into is None else into.read
        with self._lock:
            own = self.own.get_into(blocks, None if into is None else into.own)
            if own is None:
                return None
            entry = _Read(read, tuple(blocks), own, Ticket(), set(self._followers))
            self._reads[read.number] = self._reads_by_own[own] = self._reads_by_whole[entry.whole] = entry
        begin = group.BeginLoad(load=read.number, blocks=planned_messages(blocks), has_pages=into is not None)
        self._log.add(group.Order(begin_load=begin))
        return entry.whole

    def put(
        self, block: HostBlock, *, pin_end_time: float = NOT_PINNED, request_id: RequestId | None = None
    ) -> Ticket[BlockPersisted]:
        region = block.regions[0]
        assert isinstance(region, CopiedRegion), "every block was copied on all ranks"
        put = group.Put(
            header=header_message(block.header), copy=region.copy.number, pin_end_time=pin_end_time
        )
        self._log.add(group.Order(put=put))
        return self.own.put(block, pin_end_time=pin_end_time, request_id=request_id)

    # If rank 0's tier has no room for a command, no rank gets it.

    def touch(self, blocks: Names) -> bool:
        is_taken = self.own.touch(blocks)
        if is_taken:
            self._mark("touch", blocks)
        return is_taken

    def demote(self, blocks: Names) -> bool:
        is_taken = self.own.demote(blocks)
        if is_taken:
            self._mark("demote", blocks)
        return is_taken

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        ticket = self.own.pin(blocks, end_time)
        if ticket is not None:
            self._mark("pin", blocks, end_time=end_time)
        return ticket

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[BlocksPurged] | None:
        ticket = self.own.delete(blocks, is_final=is_final)
        if ticket is not None and blocks:
            self._mark("delete_final" if is_final else "delete", blocks)
        return ticket

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        """The result is rank 0's; blocks damaged on other ranks leave all ranks when the damage is found."""
        ticket = self.own.verify(blocks)
        if ticket is not None:
            self._mark("verify_all" if blocks is None else "verify", blocks or ())
        return ticket

    def abandon(self, ticket: AnyTicket) -> None:
        with self._lock:
            read = self._reads_by_whole.get(ticket)
            if read is not None:
                self._drop(read)
        self.own.abandon(ticket if read is None else read.own)

    def silence_s(self, ticket: AnyTicket) -> float:
        with self._lock:
            read = self._reads_by_whole.get(ticket)
            waiting = () if read is None else tuple(read.waiting)
        if read is None:
            return self.own.silence_s(ticket)
        theirs = (self._health[rank].silent_s.get(read.read.number, 0.0) for rank in waiting)
        return max(self.own.silence_s(read.own), *theirs, 0.0)

    def start(self) -> None:
        self.own.start()

    def close(self, *, deadline_time: float) -> None:
        self.own.close(deadline_time=deadline_time)

    def join(self, *, timeout_s: float) -> bool:
        return self.own.join(timeout_s=timeout_s)

    @property
    def queue_space_bytes(self) -> int:
        return self.own.queue_space_bytes

    @property
    def block_limit_bytes(self) -> int:
        return self.own.block_limit_bytes

    @property
    def write_budget(self) -> WriteBudget | None:
        return self.own.write_budget

    def heads(self, blocks: Names) -> Ticket[tuple[BlockHeader, ...]] | None:
        return self.own.heads(blocks)

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[ChainFound] | None:
        return None

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        return None

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        return self.own.names(block_limit=block_limit)

    def keep_rates(self, rates: LearnedRates) -> bool:
        return self.own.keep_rates(rates)

    def stats(self) -> Ticket[CacheStats] | None:
        return self.own.stats()

    @property
    def hung_read_count(self) -> int:
        return self.own.hung_read_count + sum(each.hung_read_count for each in self._health.values())

    @property
    def stall_s(self) -> float:
        return max(self.own.stall_s, *(each.stall_s for each in self._health.values()))

    def leave_cores(self, *, to_decode: bool) -> None:
        self.own.leave_cores(to_decode=to_decode)


def _remembered(block: LoadedBlock, read: GroupRead) -> LoadedBlock:
    regions = (ReadRegion(each.kind, each.tensors, read, block.header.hash) for each in block.regions)
    return LoadedBlock(block.header, tuple(regions))
