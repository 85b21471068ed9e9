"""Eviction from RAM: who goes for whom, by way of the SSD or at once. Inference thread only.

A block on its way to SSD still holds its arrays; its bytes count as room already, and the write
queue bounds how many they are.
"""

from __future__ import annotations

from collections.abc import Collection

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas


class RamEviction:
    """Keeps the RAM tier within its budget plus what is leaving."""

    def __init__(self, *, ram: RamTier, index: BlockIndex, spills: Spills, shares: TenantQuotas) -> None:
        self._ram = ram
        self._index = index
        self._spills = spills
        self._shares = shares
        self._leaving: set[BlockHash] = set()

    @property
    def leaving(self) -> Collection[BlockHash]:
        """Blocks that leave RAM when they are written."""
        return self._leaving

    def make(self, size_bytes: int, *, spared: Collection[BlockHash], owner: BlockHash | None) -> bool:
        """Let blocks go until `size_bytes` more of this owner fit into its share and into the whole.

        False, and nothing changed, when they cannot.
        """
        own = self._shares.ram_victims(owner, size_bytes, leaving=self._leaving, spared=set(spared))
        if own is None:
            return False
        needed_bytes = size_bytes - self.leaving_bytes - sum(entry.ram_bytes for entry in own)
        kept = {*spared, *self._leaving, *(entry.hash for entry in own)}
        others = self._ram.victims(needed_bytes, spared=kept)
        if others is None:
            return False
        for victim in (*own, *others):
            self._let_go(victim, spared=spared)
        return True

    def yield_bytes(self, size_bytes: int, *, spared: Collection[BlockHash] = ()) -> int:
        """Drop least recently used blocks of at least this size from RAM; return the bytes let go.

        They are not spilled: host views would hold the memory that is wanted until they are written.
        """
        freed_bytes = 0
        for entry in self._yieldable(spared):
            if freed_bytes >= size_bytes:
                break
            freed_bytes += entry.ram_bytes
            self._drop(entry)
        return freed_bytes

    def yield_by_spilling(self, size_bytes: int, *, spared: Collection[BlockHash] = ()) -> int:
        """Let least recently used blocks go until at least this size is free or on its way to SSD; return
        the bytes that are free now."""
        freed_bytes, wanted_bytes = 0, size_bytes - self.leaving_bytes
        for entry in self._yieldable(spared):
            if wanted_bytes <= 0:
                break
            if (
                self._spills.wants(entry)
                and self._spills.under_way_count
                and not self._spills.has_credit(entry)
            ):
                break  # there is when what is being written is
            entry_bytes = entry.ram_bytes
            wanted_bytes -= entry_bytes
            self._let_go(entry, spared=spared)
            freed_bytes += entry_bytes - entry.ram_bytes
        return freed_bytes

    def yieldable_bytes(self, *, spared: Collection[BlockHash] = ()) -> int:
        """Return the bytes that could be let go of, and those that are on their way to SSD."""
        return sum(entry.ram_bytes for entry in self._yieldable(spared)) + self.leaving_bytes

    def _yieldable(self, spared: Collection[BlockHash]) -> list[Entry]:
        return [e for e in self._ram if not e.is_pinned and not e.is_spilling and e.hash not in spared]

    def keep(self, entry: Entry) -> bool:
        """Keep a block that was to leave, if others can go in its place; True when it stays."""
        if entry.hash not in self._leaving:
            return True
        self._leaving.discard(entry.hash)
        if not self.make(0, spared=(entry.hash,), owner=entry.owner):
            self._leaving.add(entry.hash)
            return False
        return True

    def spill_ended(self, entry: Entry) -> None:
        """Let go of a block that was leaving; a pinned one that was not written stays if it can."""
        if entry.hash in self._leaving and (entry.ssd or not entry.is_pinned or not self.keep(entry)):
            self._drop(entry)

    def lose_storage(self) -> None:
        """Nothing is written any more: what was leaving goes at once."""
        for entry in [entry for entry in self._ram if entry.hash in self._leaving]:
            self.spill_ended(entry)
        self._leaving.clear()

    def _let_go(self, entry: Entry, *, spared: Collection[BlockHash]) -> None:
        if entry.is_spilling or self._spills.send(entry, spared=spared):
            self._leaving.add(entry.hash)
        else:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._leaving.discard(entry.hash)
        self._ram.drop(entry)
        self._index.discard_if_empty(entry)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that leave RAM when they are written."""
        found = (self._index.get(name) for name in self._leaving)
        return sum(entry.ram_bytes for entry in found if entry is not None)
