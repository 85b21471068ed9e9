"""Disk index: records in memory of the blocks on SSD, their bytes and counts, and which is evicted first.

Owned by the storage thread. Eviction order is least recently used, but only among leaves: a
block whose parent is gone cannot be reached, so a chain shrinks from its end.
Pinned blocks, and therefore all their ancestors, stay.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.cache_stats import AgePercentiles, TierStats
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.pins import NOT_PINNED, PinEnds
from icehouse_server.storage.local.directory.manifest import BlockRecord

_STALE_LIMIT = 64
"""How many stale entries the heap may have before it is rebuilt."""
_SAMPLE_LIMIT = 8192
"""Blocks whose ages are sorted for percentiles; more would take this thread too long."""


@dataclasses.dataclass(slots=True)
class _Counts:
    """Counts of one model's blocks."""

    block_count: int = 0
    tail_count: int = 0
    pinned_block_count: int = 0
    token_count: int = 0


class DiskIndex:
    """Records by hash, with a heap of the leaves by recency.

    The heap contains stale entries (a use is noted without moving its entry); they are corrected or
    dropped when they reach the top, so each operation is O(log n) amortised.
    """

    def __init__(self, records: Iterable[BlockRecord] = ()) -> None:
        """`records` are ordered from the least to the most recently used."""
        # In bulk, not with `put`: a start with 100,000 blocks waits for this.
        self._records = {record.hash: record for record in records}
        self._uses = {name: use for use, name in enumerate(self._records, start=1)}
        self._use_number = len(self._records)
        self._oldest_number = 0
        self._child_counts = Counter([record.parent for record in self])
        self._counts: dict[Fingerprint, _Counts] = {}
        self._pin_ends = PinEnds()
        self.block_bytes = 0
        self.raw_bytes = 0
        """Tensors' bytes of the blocks, as in memory."""
        for record in self:
            self._count(record, 1)
        self._leaves = [(use, name) for name, use in self._uses.items() if self._is_evictable(name)]

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._records

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self._records.values())

    def get(self, block_hash: BlockHash) -> BlockRecord | None:
        return self._records.get(block_hash)

    def has_blocks_of(self, fingerprint: Fingerprint) -> bool:
        """Return whether any block of this model is stored."""
        counts = self._counts.get(fingerprint)
        return counts is not None and counts.block_count > 0

    def by_recency(self, fingerprint: Fingerprint) -> list[BlockRecord]:
        """Return the blocks of one fingerprint, least recently used first."""
        own = [record for record in self if record.fingerprint == fingerprint]
        return sorted(own, key=lambda record: self._uses[record.hash])

    def fill(self, stats: TierStats, fingerprint: Fingerprint, *, now: float) -> TierStats:
        """Return `stats` with the counts of one fingerprint's blocks and percentiles of their ages, which
        come from a sample if there are very many blocks."""
        self.end_pins(now)
        sample = islice(self, 0, None, 1 + len(self) // _SAMPLE_LIMIT)
        ages = (max(now - r.last_used_time, 0.0) for r in sample if r.fingerprint == fingerprint)
        counts = self._counts.get(fingerprint, _Counts())
        return dataclasses.replace(stats, **dataclasses.asdict(counts), age=AgePercentiles.of(ages))

    def put(self, record: BlockRecord) -> None:
        """Add a block as the most recently used one, or replace the one of its name."""
        if record.hash in self._records:
            self.replace(record)
        else:
            self._records[record.hash] = record
            self._child_counts[record.parent] += 1
            self._count(record, 1)
        self._uses[record.hash] = self._next_use()
        self._offer(record.hash)

    def replace(self, record: BlockRecord) -> None:
        """Replace the record of a stored block, without changing its recency."""
        self._count(self._records[record.hash], -1)
        self._records[record.hash] = record
        self._count(record, 1)

    def covers(self, block: HostBlock) -> bool:
        """Return whether a block is stored with every region that `block` has."""
        record = self._records.get(block.header.hash)
        if record is None:
            return False
        return all(record.region_bytes(region.kind) or not region.size_bytes for region in block.regions)

    def remove(self, block_hash: BlockHash) -> BlockRecord | None:
        """Forget a block and return its record, or None if it is not stored."""
        record = self._records.pop(block_hash, None)
        if record is None:
            return None
        del self._uses[block_hash]
        self._count(record, -1)
        self._child_counts[record.parent] -= 1
        if not self._child_counts[record.parent]:
            del self._child_counts[record.parent]
            self._offer(record.parent)
        return record

    def touch(self, block_hash: BlockHash, *, now_time: float) -> bool:
        """Note a use at a time in seconds since the epoch; False if the block is not stored."""
        record = self._records.get(block_hash)
        if record is None:
            return False
        self._records[block_hash] = record._replace(
            last_used_time=max(now_time, record.last_used_time), hit_count=record.hit_count + 1
        )
        self._uses[block_hash] = self._next_use()
        return True

    def demote(self, block_hash: BlockHash) -> None:
        """Make a block the least recently used one, if it is stored."""
        if block_hash in self._records:
            self._oldest_number -= 1
            self._uses[block_hash] = self._oldest_number
            self._offer(block_hash)

    def set_pin(self, block_hash: BlockHash, end_time: float) -> None:
        """Protect a stored block and its ancestors from eviction until then (`Clock.wall`), or no longer."""
        self.replace(self._records[block_hash]._replace(pin_end_time=end_time))
        self._offer(block_hash)

    def end_pins(self, now_time: float) -> None:
        """Unpin the blocks whose pins have ended (`Clock.wall`). Their rows already have the end time."""
        for block_hash in self._pin_ends.take(now_time):
            self.set_pin(block_hash, NOT_PINNED)

    def next_victim(self) -> BlockRecord | None:
        """Return the next block to evict, without removing it, or None if none can be evicted."""
        while self._leaves:
            use, block_hash = self._leaves[0]
            if not self._is_evictable(block_hash):
                heapq.heappop(self._leaves)
            elif self._uses[block_hash] != use:
                heapq.heapreplace(self._leaves, (self._uses[block_hash], block_hash))
            else:
                return self._records[block_hash]
        return None

    def _count(self, record: BlockRecord, sign: int) -> None:
        counts = self._counts.get(record.fingerprint)
        if counts is None:
            counts = self._counts[record.fingerprint] = _Counts()
        counts.block_count += sign
        counts.tail_count += sign * (record.token_count < record.block_token_limit)
        counts.pinned_block_count += sign * record.is_pinned
        counts.token_count += sign * record.token_count
        self.block_bytes += sign * record.file_bytes
        self.raw_bytes += sign * (record.kv_bytes + record.window_bytes + record.checkpoint_bytes)
        self._pin_ends.note(record.hash, record.pin_end_time if sign > 0 else NOT_PINNED)

    def _offer(self, block_hash: BlockHash) -> None:
        """Push a block onto the heap if it may be evicted now."""
        if not self._is_evictable(block_hash):
            return
        heapq.heappush(self._leaves, (self._uses[block_hash], block_hash))
        if len(self._leaves) > 2 * len(self._records) + _STALE_LIMIT:
            # Each pin that was set and removed leaves an entry behind.
            fresh = {name for _, name in self._leaves if self._is_evictable(name)}
            self._leaves = [(self._uses[name], name) for name in fresh]
            heapq.heapify(self._leaves)

    def _is_evictable(self, block_hash: BlockHash) -> bool:
        record = self._records.get(block_hash)
        return record is not None and not record.is_pinned and block_hash not in self._child_counts

    def _next_use(self) -> int:
        self._use_number += 1
        return self._use_number
