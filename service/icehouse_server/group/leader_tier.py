"""Leader tier: the SSD tiers of all ranks as one (engine's, storage's and the channel's threads).

Each rank stores its part of a block under the same name, in its own directory. Rank 0's manifest is what
the engine knows. A block that some rank does not have is taken off it: at the start by comparing names,
later when a read ends. So a rank that lost its directory costs recomputation, never wrong text.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from icehouse.group.v1 import group_service_pb2 as group

from icehouse_server.domain.blocks import BlockHeader, Damage, HostBlock
from icehouse_server.domain.cache_stats import CacheStats
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.group.messages import header_message, names_from, planned_messages
from icehouse_server.group.order_log import OrderLog
from icehouse_server.group.reads import CopiedRegion, GroupRead, GroupTarget, ReadRegion
from icehouse_server.pins import NOT_PINNED
from icehouse_server.storage.api import (
    AnyTicket,
    ColdTier,
    Failure,
    Fetched,
    Found,
    Inventory,
    KvTarget,
    Loaded,
    LoadedBlock,
    Names,
    Outcome,
    Persisted,
    PlannedBlock,
    Purged,
    Ticket,
    Verified,
    WriteBudget,
)


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    """A read that ends when all ranks have ended it."""

    read: GroupRead
    blocks: Sequence[PlannedBlock]
    own: Ticket[Loaded]
    whole: Ticket[Loaded]
    waiting: set[int]
    """Followers that read still."""
    has_own: bool = False
    missing: Failure | None = None
    """Of the first block that some follower does not have."""
    missing_at: int = 0

    @property
    def is_done(self) -> bool:
        return self.has_own and not self.waiting


class LeaderTier:
    """Implements ColdTier. `own` is rank 0's tier, made with `take` to post to; both before `start`."""

    own: ColdTier

    def __init__(self, log: OrderLog, *, followers: Sequence[int], post: Callable[[Outcome], object]) -> None:
        self._log = log
        self._followers = frozenset(followers)
        self._post = post
        self._lock = threading.Lock()
        self._reads: dict[int, _Read] = {}
        self._reads_by_own: dict[AnyTicket, _Read] = {}
        self._reads_by_whole: dict[AnyTicket, _Read] = {}
        self._stored: dict[int, set[bytes]] = {rank: set() for rank in followers}
        self._unlisted = set(followers)
        """Followers that have not said yet what they have."""
        self._held_back: list[Inventory] = []

    def take(self, outcome: Outcome) -> None:
        """Take what rank 0's tier posts. Any thread."""
        with self._lock:
            posted = self._taken(outcome)
        for each in posted:
            self._post(each)

    def _taken(self, outcome: Outcome) -> list[Outcome]:
        if isinstance(outcome, Inventory) and (self._unlisted or self._held_back):
            self._held_back.append(outcome)
            return self._listed()
        read = self._reads_by_own.pop(outcome, None) if isinstance(outcome, Ticket) else None
        if read is None:
            return [outcome]
        read.has_own = True
        return self._ended(read)

    def report(self, rank: int, report: group.FollowRequest) -> None:
        """Take what a follower reports of its tier. The channel's threads."""
        posted: list[Outcome] = []
        with self._lock:
            kind = report.WhichOneof("report")
            if kind == "stored" and rank in self._unlisted:
                self._stored[rank].update(report.stored.names)
                if report.stored.is_last:
                    self._unlisted.remove(rank)
                    posted = self._listed()
            elif kind == "load_ended":
                posted = self._load_ended(rank, report.load_ended)
        if kind == "lost":
            self._forget(names_from(report.lost.names))
        for each in posted:
            self._post(each)

    def _listed(self) -> list[Outcome]:
        """Return rank 0's inventory of what all ranks have, once it is known."""
        parts = self._held_back
        if self._unlisted or not (parts and parts[-1].is_last):
            return []
        self._held_back = []
        common = set.intersection(*self._stored.values())
        known = {record.hash for part in parts for record in part.records}
        if lacking := tuple(known - common):
            self.own.delete(lacking)
        if lacking or any(stored - known for stored in self._stored.values()):
            gone = [*lacking, *sorted(set().union(*self._stored.values()) - (known & common))]
            self._mark("delete", tuple(map(BlockHash, gone)))
        for stored in self._stored.values():
            stored.clear()
        return [
            dataclasses.replace(part, records=tuple(r for r in part.records if r.hash in common))
            for part in parts
        ]

    def _load_ended(self, rank: int, ended: group.LoadEnded) -> list[Outcome]:
        read = self._reads.get(ended.load)
        if read is None:
            return []
        read.waiting.discard(rank)
        if ended.block_count < len(read.blocks) and (
            read.missing is None or ended.block_count < read.missing_at
        ):
            name = read.blocks[ended.block_count].header.hash
            detail = f"rank {rank} does not have it"
            read.missing_at = ended.block_count
            read.missing = (
                Failure(Damage.MEMORY, detail)
                if ended.lacks_memory
                else Failure(Damage.MISSING, detail, hash=name)
            )
        return self._ended(read)

    def _ended(self, read: _Read) -> list[Outcome]:
        if not read.is_done:
            return []
        del self._reads[read.read.number], self._reads_by_whole[read.whole]
        outcome = read.own.outcome
        assert outcome is not None
        if isinstance(outcome, Loaded) and outcome.failure is None:
            blocks = tuple(_remembered(block, read.read) for block in outcome.blocks)
            outcome = dataclasses.replace(outcome, blocks=blocks, failure=read.missing)
        read.whole.finish(outcome)
        if read.missing is not None and read.missing.hash is not None:
            self._forget((read.missing.hash,))
        return [read.whole]

    def _forget(self, names: Names) -> None:
        """Remove what some rank does not have from all."""
        self.own.delete(names)
        self._mark("delete", names)

    def _mark(self, what: str, names: Names, *, end_time: float = NOT_PINNED) -> None:
        self._log.add(group.Order(mark=group.Mark(what=what, names=names, end_time=end_time)))

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvTarget | None) -> Ticket[Loaded] | None:
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
    ) -> Ticket[Persisted]:
        region = block.regions[0]
        assert isinstance(region, CopiedRegion), "every block was copied on all ranks"
        put = group.Put(
            header=header_message(block.header), copy=region.copy.number, pin_end_time=pin_end_time
        )
        self._log.add(group.Order(put=put))
        return self.own.put(block, pin_end_time=pin_end_time, request_id=request_id)

    def touch(self, blocks: Names) -> bool:
        self._mark("touch", blocks)
        return self.own.touch(blocks)

    def demote(self, blocks: Names) -> bool:
        self._mark("demote", blocks)
        return self.own.demote(blocks)

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        self._mark("pin", blocks, end_time=end_time)
        return self.own.pin(blocks, end_time)

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[Purged] | None:
        self._mark("delete_final" if is_final else "delete", blocks)
        return self.own.delete(blocks, is_final=is_final)

    def abandon(self, ticket: AnyTicket) -> None:
        read = self._reads_by_whole.get(ticket)
        self.own.abandon(ticket if read is None else read.own)

    def silence_s(self, ticket: AnyTicket) -> float:
        read = self._reads_by_whole.get(ticket)
        return self.own.silence_s(ticket if read is None else read.own)

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

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[Found] | None:
        return None

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        return None

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        return self.own.verify(blocks)

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        return self.own.names(block_limit=block_limit)

    def stats(self) -> Ticket[CacheStats] | None:
        return self.own.stats()

    @property
    def hung_read_count(self) -> int:
        return self.own.hung_read_count

    @property
    def stall_s(self) -> float:
        return self.own.stall_s

    def leave_cores(self, *, to_decode: bool) -> None:
        self.own.leave_cores(to_decode=to_decode)


def _remembered(block: LoadedBlock, read: GroupRead) -> LoadedBlock:
    regions = (ReadRegion(each.kind, each.tensors, read, block.header.hash) for each in block.regions)
    return LoadedBlock(block.header, tuple(regions))
