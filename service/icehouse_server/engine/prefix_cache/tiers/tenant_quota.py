"""Tenant quotas: what each tenant's blocks take of the tiers, and which go when a quota is full.

Inference thread only. A tenant is known here by its roots, h0: every chain begins below one, so blocks
on SSD have an owner again after a restart without any name being stored. A tenant has a root for the model
by itself and one for each adapter, and one quota for all of them. One that is over its quota loses blocks
of its own, never of another.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

from icehouse_server.domain.blocks import root_hash
from icehouse_server.domain.cache_stats import TenantShare
from icehouse_server.domain.ids import (
    NO_ADAPTER,
    AdapterDigest,
    AdapterName,
    BlockHash,
    CacheScope,
    Tenant,
)
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.stored_order import StoredOrder

ROOT_LIMIT = 1024
"""Tenants whose roots are kept; the ones that asked longest ago are forgotten, and made again."""

_SLACK = 0.05
"""Part of the SSD quota that is freed beyond what is needed, so that not every spill looks for victims."""

_PINNED_SHARE = 0.75
"""Of each tier, and of a tenant's quota of it: what its pinned blocks may take, so that something can go."""


@dataclasses.dataclass(frozen=True, slots=True)
class PinExcess:
    """What a tenant's pins would take of a tier, and what they may."""

    tier: str
    wanted_bytes: int
    limit_bytes: int


class TenantQuotas:
    """Roots of tenants, and the bytes below each."""

    def __init__(self, settings: PrefixSettings, *, index: BlockIndex, ram: RamTier) -> None:
        self._settings = settings
        self._limits = settings.quotas
        self._adapters: dict[AdapterName, AdapterDigest | None] = {NO_ADAPTER: None, **settings.adapters}
        self._index = index
        self._ram = ram
        self._roots: OrderedDict[Tenant, dict[AdapterName, BlockHash]] = OrderedDict()
        self._kin: dict[BlockHash, frozenset[BlockHash]] = {}
        self._stored_bytes: Counter[BlockHash | None] = Counter()
        self._pinned: dict[BlockHash, Entry] = {}
        self._stored_order = StoredOrder()
        """Kept where there are limits on SSD."""

    def root(self, scope: CacheScope) -> BlockHash:
        """Return h0 for this model, tenant and adapter, which is one of those served."""
        if scope.tenant not in self._roots:
            self._add(scope.tenant)
        self._roots.move_to_end(scope.tenant)
        return self._roots[scope.tenant][scope.adapter]

    def claim(self, entries: Iterable[Entry], owner: BlockHash) -> None:
        """Give blocks of an unknown owner to the tenant that has just used them."""
        for entry in entries:
            if entry.owner is None:
                self._move(entry, -1)
                entry.owner = owner
                self._move(entry, 1)

    def note_stored(self, entry: Entry, *, change_bytes: int) -> None:
        """Account for a block that came to SSD, or left it."""
        self._stored_bytes[entry.owner] += change_bytes
        if not self._stored_bytes[entry.owner]:
            del self._stored_bytes[entry.owner]
        if change_bytes > 0 and self._limits.ssd_bytes:
            self._stored_order.add(entry)

    def ram_victims(
        self,
        owner: BlockHash | None,
        size_bytes: int,
        *,
        spared: Collection[BlockHash],
    ) -> list[Entry] | None:
        """Return the owner's blocks to let go so that `size_bytes` more stay within its quota of RAM.

        Oldest first; None when even all that may go would not do.
        """
        limit = self._limits.ram_bytes
        kin = self._kin_of(owner)
        excess = sum(self._ram.used_by[root] for root in kin) + size_bytes - limit
        if not limit or excess <= 0:
            return []
        own = [entry for entry in self._ram if entry.owner in kin]
        excess -= sum(entry.ram_bytes for entry in own if entry.is_leaving)
        chosen = []
        for entry in own:
            if excess <= 0:
                break
            if not entry.is_pinned and entry.hash not in spared and not entry.is_leaving:
                chosen.append(entry)
                excess -= entry.ram_bytes
        return chosen if excess <= 0 else None

    def ssd_victims(
        self, entry: Entry, size_bytes: int, *, spared: Collection[BlockHash]
    ) -> list[Entry] | None:
        """Return blocks on SSD to remove so that this one stays within its owner's quota.

        Least recently used first, tails before heads, and never what the block follows. None when even
        all that may go would not do.
        """
        limit, kin = self._limits.ssd_bytes, self._kin_of(entry.owner)
        if not limit:
            return []
        coming_bytes = sum(e.spill.size_bytes for e in self._index.spilling if e.spill and e.owner in kin)
        excess = sum(self._stored_bytes[root] for root in kin) + coming_bytes + size_bytes - limit
        if excess <= 0:
            return []
        kept = self._ancestors(entry).union(spared)
        chosen = self._stored_order.victims(kin, needed_bytes=excess + limit * _SLACK, kept=kept)
        return chosen if sum(other.ssd_bytes for other in chosen) >= excess else None

    def pin_excess(self, entries: Iterable[Entry]) -> PinExcess | None:
        """Say which tier the tenant's pinned blocks would take too much of with these; None for neither."""
        added = {entry.hash: entry for entry in entries}
        kin = frozenset[BlockHash | None]().union(*(self._kin_of(entry.owner) for entry in added.values()))
        own = {name: entry for name, entry in self._pinned.items() if entry.owner in kin} | added
        tiers = (
            ("RAM", sum(e.ram_bytes for e in own.values()), self._limits.ram_bytes or self._ram.limit_bytes),
            (
                "SSD",
                sum(e.ssd_bytes for e in own.values()),
                self._limits.ssd_bytes or self._settings.ssd_limit_bytes,
            ),
        )
        for name, wanted_bytes, tier_bytes in tiers:
            limit_bytes = int(tier_bytes * _PINNED_SHARE)
            if tier_bytes and wanted_bytes > limit_bytes:
                return PinExcess(name, wanted_bytes, limit_bytes)
        return None

    def note_pinned(self, entry: Entry) -> None:
        """A block counts among its owner's pinned ones."""
        self._pinned[entry.hash] = entry

    def note_unpinned(self, entry: Entry) -> None:
        """A block may go again where its owner's quota asks for it."""
        self._pinned.pop(entry.hash, None)
        if self._limits.ssd_bytes and entry.ssd:
            self._stored_order.add(entry)

    def snapshot(self) -> tuple[TenantShare, ...]:
        """Return what each known tenant holds."""
        return tuple(
            TenantShare(
                tenant,
                ram_bytes=sum(self._ram.used_by[root] for root in set(roots.values())),
                ssd_bytes=sum(self._stored_bytes[root] for root in set(roots.values())),
            )
            for tenant, roots in self._roots.items()
        )

    def _add(self, tenant: Tenant) -> None:
        fingerprint, secret = self._settings.fingerprint, self._settings.name_secret
        roots = {
            name: root_hash(fingerprint=fingerprint, tenant=tenant, adapter=digest, secret=secret)
            for name, digest in self._adapters.items()
        }
        self._roots[tenant] = roots
        self._kin |= dict.fromkeys(roots.values(), frozenset(roots.values()))
        if len(self._roots) > ROOT_LIMIT:
            _, forgotten = self._roots.popitem(last=False)
            for root in set(forgotten.values()):
                del self._kin[root]

    def _kin_of(self, owner: BlockHash | None) -> frozenset[BlockHash | None]:
        """Return all roots of the tenant whose root this is; alone while the tenant has not asked yet."""
        return frozenset(self._kin.get(owner, (owner,)) if owner is not None else (None,))

    def _move(self, entry: Entry, sign: int) -> None:
        self._ram.used_by[entry.owner] += sign * entry.ram_bytes
        self.note_stored(entry, change_bytes=sign * entry.ssd_bytes)

    def _ancestors(self, entry: Entry) -> set[BlockHash]:
        found = {entry.hash}
        parent = self._index.get(entry.parent)
        while parent is not None:
            found.add(parent.hash)
            parent = self._index.get(parent.parent)
        return found
