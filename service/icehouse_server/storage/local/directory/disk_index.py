"""Disk index: the blocks on SSD in memory, what they weigh, and which goes first.

Owned by the storage thread. Eviction order is least recently used, but only among leaves: a
block with a stored child is reachable for nobody without its parent, so tails go before heads
and a chain shrinks from its end. Pinned blocks, and therefore all their ancestors, stay.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.ids import BlockHash, Fingerprint
from icehouse_server.storage.local.directory.record import BlockRecord
from icehouse_server.storage.tier_counts import TierCounts

_STALE_LIMIT = 64
"""Stale entries that are not worth making the heap anew for."""


class DiskIndex:
    """Records by hash, with a heap of the leaves by recency.

    The heap holds stale entries (a use is only noted, not moved); they are set right or
    thrown away when they reach the top, so each operation is O(log n) amortised.
    """

    def __init__(self) -> None:
        self._records: dict[BlockHash, BlockRecord] = {}
        self._uses: dict[BlockHash, int] = {}
        self._child_counts: dict[BlockHash, int] = {}
        self._leaves: list[tuple[int, BlockHash]] = []
        self._use_number = 0
        self._counts: dict[Fingerprint, TierCounts] = {}
        self.block_bytes = 0

    @classmethod
    def of(cls, records: Iterable[BlockRecord]) -> DiskIndex:
        """Return an index of records given from the least to the most recently used."""
        index = cls()
        # In bulk, not by `add`: a start with 100,000 blocks waits for this.
        given = list(records)
        index._records = {record.hash: record for record in given}
        index._uses = dict(zip(index._records, range(1, len(given) + 1), strict=True))
        index._use_number = len(given)
        index._child_counts = dict(Counter([record.parent for record in given]))
        index.block_bytes = sum([record.file_bytes for record in given])
        index._leaves = [
            (use, record.hash)
            for use, record in enumerate(given, start=1)
            if record.hash not in index._child_counts and not record.pinned
        ]
        for fingerprint in {record.fingerprint for record in given}:
            index._count([record for record in given if record.fingerprint == fingerprint], fingerprint)
        return index

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._records

    def __iter__(self) -> Iterator[BlockRecord]:
        return iter(self._records.values())

    def get(self, block_hash: BlockHash) -> BlockRecord | None:
        """Return the record of a stored block."""
        return self._records.get(block_hash)

    def counts(self, fingerprint: Fingerprint) -> TierCounts:
        """Return the counts of one fingerprint's blocks, as they are from now on."""
        if fingerprint not in self._counts:
            self._counts[fingerprint] = TierCounts(
                lambda: (r.hash for r in self._records.values() if r.fingerprint == fingerprint)
            )
        return self._counts[fingerprint]

    def used_time(self, block_hash: BlockHash) -> float:
        """Return when a stored block was last used, seconds since the epoch."""
        return self._records[block_hash].last_used_time

    def by_recency(self, fingerprint: Fingerprint) -> list[BlockRecord]:
        """Return the blocks of one fingerprint, least recently used first."""
        mine = [record for record in self._records.values() if record.fingerprint == fingerprint]
        return sorted(mine, key=lambda record: self._uses[record.hash])

    def add(self, record: BlockRecord) -> None:
        """Add a block as the most recently used one."""
        assert record.hash not in self._records, f"Block {record.hash.hex()} added twice"
        self._records[record.hash] = record
        self._uses[record.hash] = self._next_use()
        self._child_counts[record.parent] = self._child_counts.get(record.parent, 0) + 1
        self.block_bytes += record.file_bytes
        self._count([record], record.fingerprint)
        self._offer(record.hash)

    def put(self, record: BlockRecord) -> None:
        """Add a block as the most recently used one, or put it in the place of the one of its name."""
        stored = self._records.get(record.hash)
        if stored is None:
            self.add(record)
            return
        self._replace(stored, record)
        self._uses[record.hash] = self._next_use()

    def covers(self, block: HostBlock) -> bool:
        """Say whether a block is stored with every region that it has here."""
        record = self._records.get(block.header.hash)
        if record is None:
            return False
        return all(record.region_bytes(region.kind) or not region.size_bytes for region in block.regions)

    def remove(self, block_hash: BlockHash) -> BlockRecord | None:
        """Forget a block and return its record, or None when it is not stored."""
        record = self._records.pop(block_hash, None)
        if record is None:
            return None
        del self._uses[block_hash]
        self.block_bytes -= record.file_bytes
        self._discount(record)
        left = self._child_counts[record.parent] - 1
        if left:
            self._child_counts[record.parent] = left
        else:
            del self._child_counts[record.parent]
            self._offer(record.parent)
        return record

    def touch(self, block_hash: BlockHash, *, now_time: float) -> bool:
        """Note a use, seconds since the epoch; False when the block is not stored."""
        record = self._records.get(block_hash)
        if record is None:
            return False
        self._records[block_hash] = record._replace(
            last_used_time=max(now_time, record.last_used_time), hit_count=record.hit_count + 1
        )
        self._uses[block_hash] = self._next_use()
        return True

    def set_pinned(self, block_hash: BlockHash, *, pinned: bool) -> bool:
        """Protect a block and its ancestors from eviction, or stop to; False when it is not stored."""
        record = self._records.get(block_hash)
        if record is None:
            return False
        self._replace(record, record._replace(pinned=pinned))
        self._offer(block_hash)
        return True

    def restamp(self, record: BlockRecord) -> None:
        """Replace the record of a stored block by what its file says now; its recency stays."""
        self._replace(self._records[record.hash], record)

    def next_victim(self) -> BlockRecord | None:
        """Return the block to evict next without removing it, or None when every one is held."""
        while self._leaves:
            use, block_hash = self._leaves[0]
            if not self._is_evictable(block_hash):
                heapq.heappop(self._leaves)
            elif self._uses[block_hash] != use:
                heapq.heapreplace(self._leaves, (self._uses[block_hash], block_hash))
            else:
                return self._records[block_hash]
        return None

    def _replace(self, stored: BlockRecord, record: BlockRecord) -> None:
        self.block_bytes += record.file_bytes - stored.file_bytes
        self._records[record.hash] = record
        if record.pinned != stored.pinned:
            self.counts(record.fingerprint).note_pinned(is_pinned=record.pinned)

    def _count(self, records: Sequence[BlockRecord], fingerprint: Fingerprint) -> None:
        self.counts(fingerprint).add(
            [record.hash for record in records],
            token_count=sum([record.token_count for record in records]),
            tail_count=sum([_is_tail(record) for record in records]),
            pinned_count=sum([record.pinned for record in records]),
        )

    def _discount(self, record: BlockRecord) -> None:
        self.counts(record.fingerprint).remove(
            record.hash,
            token_count=record.token_count,
            is_tail=_is_tail(record),
            is_pinned=record.pinned,
        )

    def _offer(self, block_hash: BlockHash) -> None:
        if self._is_evictable(block_hash):
            heapq.heappush(self._leaves, (self._uses[block_hash], block_hash))
            if len(self._leaves) > 2 * len(self._records) + _STALE_LIMIT:
                # Pinned and unpinned again and again, each leaves an entry behind.
                fresh = {name for _, name in self._leaves if self._is_evictable(name)}
                self._leaves = [(self._uses[name], name) for name in fresh]
                heapq.heapify(self._leaves)

    def _is_evictable(self, block_hash: BlockHash) -> bool:
        record = self._records.get(block_hash)
        return record is not None and not record.pinned and block_hash not in self._child_counts

    def _next_use(self) -> int:
        self._use_number += 1
        return self._use_number


def _is_tail(record: BlockRecord) -> bool:
    return record.token_count < record.block_token_limit
