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
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.engine.prefix_cache.tiers.entry import Entry
from icehouse_server.engine.prefix_cache.tiers.index import BlockIndex
from icehouse_server.engine.prefix_cache.tiers.ram_tier import RamTier, add_bytes
from icehouse_server.engine.prefix_cache.tiers.settings import PrefixSettings
from icehouse_server.engine.prefix_cache.tiers.stored_order import StoredOrder

ROOT_LIMIT = 1024
"""Tenants whose roots are kept; the ones that asked longest ago are forgotten, and made again."""

_SLACK = 0.05
"""Part of the SSD quota that is freed beyond what is needed, so that not every spill looks for victims."""

_PINNED_SHARE = 0.75
"""Of each tier, and of a tenant's quota of it: what pinned blocks may take, so that something can go."""


@dataclasses.dataclass(frozen=True, slots=True)
class PinExcess:
    """What pins would take of a tier, and what they may: one tenant's, or those of all together."""

    tier: str
    wanted_bytes: int
    limit_bytes: int
    is_everybodys: bool


class TenantQuotas:
    """Roots of tenants, and the bytes below each."""

    def __init__(self, settings: PrefixSettings, *, index: BlockIndex, ram: RamTier, log: BlockLog) -> None:
        self._settings = settings
        self._log = log
        self._limits = settings.quotas
        self._adapters: dict[AdapterName, AdapterDigest | None] = {NO_ADAPTER: None, **settings.adapters}
        self._index = index
        self._ram = ram
        self._roots: OrderedDict[Tenant, dict[AdapterName, BlockHash]] = OrderedDict()
        self._kin: dict[BlockHash, frozenset[BlockHash]] = {}
        self._stored_bytes: Counter[BlockHash | None] = Counter()
        self._pinned_stored_bytes: Counter[BlockHash | None] = Counter()
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
                stored_bytes = entry.ssd_bytes
                self.note_stored(entry, before_bytes=stored_bytes, after_bytes=0)
                self._ram.set_owner(entry, owner)
                self.note_stored(entry, before_bytes=0, after_bytes=stored_bytes)

    def note_stored(self, entry: Entry, *, before_bytes: int, after_bytes: int) -> None:
        """Account for a block that came to SSD, left it, or takes more or less there."""
        change_bytes = after_bytes - before_bytes
        add_bytes(self._stored_bytes, entry.owner, change_bytes)
        if entry.is_pinned:
            add_bytes(self._pinned_stored_bytes, entry.owner, change_bytes)
        elif self._limits.ssd_bytes and after_bytes and not before_bytes:
            self._stored_order.add(entry)
        elif self._limits.ssd_bytes and before_bytes and not after_bytes:
            self._stored_order.remove(entry)

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
        excess -= sum(
            entry.ram_bytes for entry in self._index.spilling if entry.is_leaving and entry.owner in kin
        )
        chosen = []
        for entry in self._ram.oldest(kin):
            if excess <= 0:
                break
            if entry.hash not in spared and not entry.is_leaving:
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
        """Say which tier would have too much of it pinned with these, by their tenant or by all; None for
        neither."""
        added = [entry for entry in entries if not entry.is_pinned]
        kin = frozenset[BlockHash | None]().union(*(self._kin_of(entry.owner) for entry in added))
        ram, ssd = self._ram.pinned_by, self._pinned_stored_bytes
        ram_bytes, ssd_bytes = sum(e.ram_bytes for e in added), sum(e.ssd_bytes for e in added)
        ram_limit, ssd_limit = self._ram.limit_bytes, self._settings.ssd_limit_bytes
        wanted = (
            ("RAM", ram_bytes + sum(ram[root] for root in kin), self._limits.ram_bytes or ram_limit, False),
            ("SSD", ssd_bytes + sum(ssd[root] for root in kin), self._limits.ssd_bytes or ssd_limit, False),
            ("RAM", ram_bytes + ram.total(), ram_limit, True),
            ("SSD", ssd_bytes + ssd.total(), ssd_limit, True),
        )
        for tier, wanted_bytes, tier_bytes, is_everybodys in wanted:
            limit_bytes = int(tier_bytes * _PINNED_SHARE)
            if tier_bytes and wanted_bytes > limit_bytes:
                return PinExcess(tier, wanted_bytes, limit_bytes, is_everybodys)
        return None

    def set_pinned(self, entry: Entry, *, pinned: bool) -> None:
        """Have a block count among its owner's pinned ones, or have it go again where a quota asks for it."""
        if entry.is_pinned is pinned:
            return
        self._ram.set_pinned(entry, pinned=pinned)
        add_bytes(self._pinned_stored_bytes, entry.owner, entry.ssd_bytes if pinned else -entry.ssd_bytes)
        if self._limits.ssd_bytes and entry.ssd_bytes:
            if pinned:
                self._stored_order.remove(entry)
            else:
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
        self._log.add_roots({root: CacheScope(tenant, name) for name, root in roots.items()})
        self._kin |= dict.fromkeys(roots.values(), frozenset(roots.values()))
        if len(self._roots) > ROOT_LIMIT:
            _, forgotten = self._roots.popitem(last=False)
            for root in set(forgotten.values()):
                del self._kin[root]
                self._log.drop_root(root)

    def _kin_of(self, owner: BlockHash | None) -> frozenset[BlockHash | None]:
        """Return all roots of the tenant whose root this is; alone while the tenant has not asked yet."""
        return frozenset(self._kin.get(owner, (owner,)) if owner is not None else (None,))

    def _ancestors(self, entry: Entry) -> set[BlockHash]:
        found = {entry.hash}
        parent = self._index.get(entry.parent)
        while parent is not None:
            found.add(parent.hash)
            parent = self._index.get(parent.parent)
        return found
