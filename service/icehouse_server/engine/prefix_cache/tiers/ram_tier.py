"""RAM tier: blocks on the device within a byte budget, least recently used first out.

Inference thread only. A chain is touched from its end to its beginning, so that a block is never
older than one that follows it and tails of chains go before heads without a tree walk.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence

from icehouse_server.domain.blocks import Region, RegionKind
from icehouse_server.domain.cache_stats import TierStats
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry


class RamTier:
    """Keeps account of which entries hold arrays. Eviction is decided by the caller, who may spill."""

    def __init__(self, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.stats = TierStats()
        """What left the tier since start."""
        self.used_by: collections.Counter[BlockHash | None] = collections.Counter()
        """Bytes by the root that owns them."""
        self._entries: collections.OrderedDict[BlockHash, Entry] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def put(self, entry: Entry, regions: Mapping[RegionKind, Region]) -> None:
        """Add regions to an entry; the caller has made space."""
        before = entry.ram_bytes
        entry.ram.update(regions)
        self.used_bytes += entry.ram_bytes - before
        self.used_by[entry.owner] += entry.ram_bytes - before
        self._entries[entry.hash] = entry
        self._entries.move_to_end(entry.hash)

    def touch(self, chain: Sequence[Entry], now: float) -> None:
        """Note that a chain was used, its first block last."""
        for entry in reversed(chain):
            entry.last_used_time = now
            if entry.hash in self._entries:
                self._entries.move_to_end(entry.hash)

    def victims(self, needed_bytes: int, *, spared: Collection[BlockHash] = ()) -> list[Entry] | None:
        """Return the entries to evict so that `needed_bytes` fit, oldest first.

        None when even all that are neither pinned nor spared would not make that space.
        """
        excess = self.used_bytes + needed_bytes - self.limit_bytes
        chosen: list[Entry] = []
        for entry in self._entries.values():
            if excess <= 0:
                break
            if not entry.is_pinned and entry.hash not in spared:
                chosen.append(entry)
                excess -= entry.ram_bytes
        return chosen if excess <= 0 else None

    def drop(self, entry: Entry, *, is_purge: bool = False) -> None:
        """Let go of an entry's arrays and count it as evicted, or as purged."""
        size_bytes = entry.ram_bytes
        if not self.forget(entry):
            return
        if is_purge:
            self.stats.purged_block_total += 1
        else:
            self.stats.evicted_block_total += 1
            self.stats.evicted_byte_total += size_bytes

    def forget(self, entry: Entry) -> bool:
        """Let go of an entry's arrays, which another block stands for; False when it had none here."""
        if self._entries.pop(entry.hash, None) is None:
            return False
        self.used_bytes -= entry.ram_bytes
        self.used_by[entry.owner] -= entry.ram_bytes
        if not self.used_by[entry.owner]:
            del self.used_by[entry.owner]
        entry.ram.clear()
        return True
