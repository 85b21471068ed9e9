"""Tenant quotas: what each tenant's blocks take of the tiers, and which go when a quota is full.

Inference thread only. A tenant is known here by its roots, h0: every chain begins below one, so blocks
on SSD have an owner again after a restart without any name being stored. A tenant has a root for the model
by itself and one for each adapter, and one quota for all of them. One that is over its quota loses blocks
of its own, never of another.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
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
from icehouse_server.engine.prefix_cache.tiers.account import Owner
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree

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
    """Roots of tenants, and who goes where one takes too much."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._limits = tree.settings.quotas
        self._adapters: dict[AdapterName, AdapterDigest | None] = {NO_ADAPTER: None, **tree.settings.adapters}
        self._roots: OrderedDict[Tenant, dict[AdapterName, BlockHash]] = OrderedDict()
        self._kin: dict[BlockHash, frozenset[BlockHash]] = {}

    def root(self, scope: CacheScope) -> BlockHash:
        """Return h0 for this model, tenant and adapter, which is one of those served."""
        if scope.tenant not in self._roots:
            self._add(scope.tenant)
        self._roots.move_to_end(scope.tenant)
        return self._roots[scope.tenant][scope.adapter]

    def kin_of(self, owner: Owner) -> frozenset[Owner]:
        """Return all roots of the tenant whose root this is; alone while the tenant has not asked yet."""
        return frozenset(self._kin.get(owner, (owner,)) if owner is not None else (None,))

    def ram_victims(
        self, owner: Owner, size_bytes: int, *, spared: Collection[BlockHash]
    ) -> list[Node] | None:
        """Return the owner's blocks to let go so that `size_bytes` more stay within its quota of RAM.

        Oldest first; None when even all that may go would not do.
        """
        tree, limit, kin = self._tree, self._limits.ram_bytes, self.kin_of(owner)
        excess = sum(tree.ram.used_by[root] for root in kin) + size_bytes - limit
        if not limit or excess <= 0:
            return []
        excess -= sum(node.ram_bytes for node in tree.spilling if node.is_leaving and node.owner in kin)
        return tree.ram.victims(
            excess, may_go=lambda node: node.hash not in spared and not node.is_leaving, owners=kin
        )

    def ssd_victims(self, node: Node, size_bytes: int, *, spared: Collection[BlockHash]) -> list[Node] | None:
        """Return blocks on SSD to remove so that this one stays within its owner's quota.

        Least recently used first, tails before heads, and never what the block follows. None when even
        all that may go would not do.
        """
        tree, limit, kin = self._tree, self._limits.ssd_bytes, self.kin_of(node.owner)
        if not limit:
            return []
        coming_bytes = sum(n.spill.size_bytes for n in tree.spilling if n.spill and n.owner in kin)
        excess = sum(tree.ssd.used_by[root] for root in kin) + coming_bytes + size_bytes - limit
        if excess <= 0:
            return []
        kept = {node.hash, *spared, *(above.hash for above in tree.ancestors(node))}
        for needed_bytes in (excess + limit * _SLACK, excess):
            chosen = tree.ssd.victims(needed_bytes, may_go=lambda other: other.hash not in kept, owners=kin)
            if chosen is not None:
                return chosen
        return None

    def pin_excess(self, nodes: Iterable[Node]) -> PinExcess | None:
        """Say which tier would have too much of it pinned with these, by their tenant or by all; None for
        neither."""
        added = [node for node in nodes if not node.is_pinned]
        kin = frozenset[Owner]().union(*(self.kin_of(node.owner) for node in added))
        settings, tree = self._tree.settings, self._tree
        for tier, account, added_bytes, quota_bytes, tier_bytes in (
            (
                "RAM",
                tree.ram,
                sum(n.ram_bytes for n in added),
                self._limits.ram_bytes,
                settings.ram_limit_bytes,
            ),
            (
                "SSD",
                tree.ssd,
                sum(n.ssd_bytes for n in added),
                self._limits.ssd_bytes,
                settings.ssd_limit_bytes,
            ),
        ):
            own_bytes = added_bytes + sum(account.pinned_by[root] for root in kin)
            everybodys_bytes = added_bytes + account.pinned_by.total()
            for wanted_bytes, limit, is_everybodys in (
                (own_bytes, quota_bytes or tier_bytes, False),
                (everybodys_bytes, tier_bytes, True),
            ):
                limit_bytes = int(limit * _PINNED_SHARE)
                if limit and wanted_bytes > limit_bytes:
                    return PinExcess(tier, wanted_bytes, limit_bytes, is_everybodys)
        return None

    def snapshot(self) -> tuple[TenantShare, ...]:
        """Return what each known tenant holds."""
        ram, ssd = self._tree.ram.used_by, self._tree.ssd.used_by
        return tuple(
            TenantShare(
                tenant,
                ram_bytes=sum(ram[root] for root in set(roots.values())),
                ssd_bytes=sum(ssd[root] for root in set(roots.values())),
            )
            for tenant, roots in self._roots.items()
        )

    def _add(self, tenant: Tenant) -> None:
        fingerprint, secret = self._tree.settings.fingerprint, self._tree.settings.name_secret
        roots = {
            name: root_hash(fingerprint=fingerprint, tenant=tenant, adapter=digest, secret=secret)
            for name, digest in self._adapters.items()
        }
        self._roots[tenant] = roots
        self._tree.log.add_roots({root: CacheScope(tenant, name) for name, root in roots.items()})
        self._kin |= dict.fromkeys(roots.values(), frozenset(roots.values()))
        if len(self._roots) > ROOT_LIMIT:
            _, forgotten = self._roots.popitem(last=False)
            for root in set(forgotten.values()):
                del self._kin[root]
                self._tree.log.drop_root(root)
