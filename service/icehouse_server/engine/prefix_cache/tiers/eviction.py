"""Eviction from RAM: who goes for whom, by way of the SSD or at once. Inference thread only.

A block on its way to SSD still holds its arrays, until it is written, or copied to memory of its own; its
bytes count as free already, and the write queue bounds how many they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas


def _is_safe(entry: Entry) -> bool:
    """Whether SSD has all that RAM has of a block, so that only time is lost with it."""
    return not entry.is_spilling and entry.ram.keys() <= entry.ssd.keys()


class RamEviction:
    """Keeps the RAM tier within its budget plus what is leaving."""

    def __init__(self, *, ram: RamTier, index: BlockIndex, spills: Spills, quotas: TenantQuotas) -> None:
        self._ram = ram
        self._index = index
        self._spills = spills
        self._quotas = quotas
        spills.when_handed_over = self._free_copied

    def make_space(
        self,
        size_bytes: int,
        *,
        spared: Collection[BlockHash],
        owner: BlockHash | None,
        request_id: RequestId | None,
    ) -> bool:
        """Let blocks go until `size_bytes` more of this owner fit into its quota and into the whole.

        False, and nothing changed, when they cannot. What goes to SSD is written for `request_id`.
        """
        own = self._quotas.ram_victims(owner, size_bytes, spared=set(spared))
        if own is None:
            return False
        leaving = self._leaving
        needed_bytes = size_bytes - sum(entry.ram_bytes for entry in (*leaving, *own))
        kept = {*spared, *(entry.hash for entry in (*leaving, *own))}
        others = self._ram.victims(needed_bytes, spared=kept)
        if others is None:
            return False
        for victim in (*own, *others):
            self._let_go(victim, spared=spared, request_id=request_id)
        return True

    def note_use(self, entries: Sequence[Entry], *, now: float, request_id: RequestId | None) -> None:
        """Account for a chain that a prompt begins with: all of it stays longer, in both tiers."""
        self._ram.touch(entries, now)
        self._spills.touch(entries)
        spared = [entry.hash for entry in entries]
        self.keep(entries, request_id)
        for entry in entries:
            entry.hit_count += 1
            if self._spills.is_write_behind:
                self._spills.offer(entry, spared=spared, request_id=request_id)

    def supersede(self, entry: Entry) -> None:
        """Let go of shorter blocks in RAM that this one can stand for."""
        if entry.ram:
            for other in self._index.superseded(entry):
                self._ram.forget(other)
                self._index.discard_if_empty(other)

    def yield_bytes(self, size_bytes: int, *, spared: Collection[BlockHash] = ()) -> int:
        """Drop least recently used blocks of at least this size from RAM; return the bytes let go.

        They are not spilled: host views would hold the memory that is wanted until they are written.
        """
        chosen = self._to_yield(size_bytes, spared)
        freed_bytes = sum(entry.ram_bytes for entry in chosen)
        for entry in chosen:
            self._drop(entry)
        return freed_bytes

    def yield_by_spilling(
        self, size_bytes: int, *, spared: Collection[BlockHash] = (), request_id: RequestId | None
    ) -> int:
        """Let least recently used blocks go until at least this size is free or on its way to SSD; return
        the bytes that are free now."""
        freed_bytes, wanted_bytes = 0, size_bytes - self.leaving_bytes
        for entry in self._to_yield(wanted_bytes, spared):
            if (
                self._spills.wants(entry)
                and self._spills.under_way_count
                and not self._spills.has_credit(entry)
            ):
                break  # there is when what is being written is
            entry_bytes = entry.ram_bytes
            wanted_bytes -= entry_bytes
            self._let_go(entry, spared=spared, request_id=request_id)
            freed_bytes += entry_bytes - entry.ram_bytes
        return freed_bytes

    def yieldable_bytes(self, *, spared: Collection[BlockHash] = ()) -> int:
        """Return the bytes that could be let go of, and those that are on their way to SSD."""
        found = (self._index.get(name) for name in spared)
        held = {e.hash: e for e in (*found, *self._index.spilling) if e is not None and not e.is_pinned}
        pinned_bytes = sum(e.ram_bytes for e in self._ram.pinned if e.hash in spared or not _is_safe(e))
        return (
            self._ram.used_bytes - pinned_bytes - sum(e.ram_bytes for e in held.values()) + self.leaving_bytes
        )

    def _to_yield(self, size_bytes: int, spared: Collection[BlockHash]) -> list[Entry]:
        """Return what to let go for at least this size; last, pinned blocks that are safe on SSD."""
        chosen: list[Entry] = []
        pinned = (entry for entry in self._ram.pinned if _is_safe(entry))
        for entry in chain(self._ram.candidates(), pinned):
            if size_bytes <= 0:
                break
            if not entry.is_spilling and entry.hash not in spared:
                chosen.append(entry)
                size_bytes -= entry.ram_bytes
        return chosen

    def keep(self, entries: Sequence[Entry], request_id: RequestId | None) -> list[Entry]:
        """Keep blocks that were to leave RAM, if others than these can go in their place; return those that
        leave all the same."""
        spared = [entry.hash for entry in entries]
        for entry in entries:
            if entry.spill is not None and entry.spill.leaves_ram and entry.ram:
                # Its bytes are taken again while others are looked for.
                entry.spill.leaves_ram = False
                entry.spill.leaves_ram = not self._fits_after_all(entry, request_id, spared=spared)
        return [entry for entry in entries if entry.is_leaving]

    def spill_ended(self, entry: Entry, *, is_kept_on_ssd: bool) -> None:
        """Clear what is known of a block's way to SSD; one that was leaving goes now.

        A pinned one stays if it can unless it `is_kept_on_ssd`: it was not written, or not as pinned.
        """
        spill = self._index.end_spill(entry)
        if spill is not None and spill.leaves_ram:
            may_stay = entry.is_pinned and not is_kept_on_ssd
            if not may_stay or not self._fits_after_all(entry, None, spared=(entry.hash,)):
                self._ram.drop(entry)
        self._index.discard_if_empty(entry)

    def lose_storage(self) -> None:
        """Nothing is written any more: all that was under way has ended, and what was leaving goes."""
        self._spills.lose_storage()
        # What stays in RAM ends first, so that it may go for a pinned block that was to leave.
        for entry in sorted(self._index.spilling, key=lambda entry: entry.is_leaving):
            self.spill_ended(entry, is_kept_on_ssd=False)

    def _fits_after_all(
        self, entry: Entry, request_id: RequestId | None, *, spared: Collection[BlockHash]
    ) -> bool:
        return self.make_space(0, spared=spared, owner=entry.owner, request_id=request_id)

    def _let_go(self, entry: Entry, *, spared: Collection[BlockHash], request_id: RequestId | None) -> None:
        if not entry.is_spilling:
            self._spills.send(entry, spared=spared, request_id=request_id)
        if entry.spill is not None:
            entry.spill.leaves_ram = True
            self._free_copied(entry)
        else:
            self._drop(entry)

    def _free_copied(self, entry: Entry) -> None:
        """Free what a block takes that leaves and is written from a copy."""
        if entry.spill is not None and entry.spill.leaves_ram and entry.spill.is_copied:
            self._ram.drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._ram.drop(entry)
        self._index.discard_if_empty(entry)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of blocks that leave RAM when they are written."""
        return sum(entry.ram_bytes for entry in self._leaving)

    @property
    def _leaving(self) -> list[Entry]:
        return [entry for entry in self._index.spilling if entry.is_leaving]
