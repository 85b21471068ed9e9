"""Tenant quotas: what each tenant's blocks take of the tiers, and which are evicted when a quota is full.

Inference thread only. A tenant is identified by its roots (h0). Every chain begins below a root, so blocks on
SSD have an owner again after a restart, though no tenant's name is stored. A tenant has one root for the bare
model and one for each adapter, and one quota for all. A tenant over its quota loses only its own blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from icehouse_server.domain.blocks import root_hash
from icehouse_server.domain.cache_stats import TenantShare
from icehouse_server.domain.ids import NO_ADAPTER, AdapterDigest, AdapterName, BlockHash, CacheScope, Tenant
from icehouse_server.engine.prefix_cache.tiers.account import Owner
from icehouse_server.engine.prefix_cache.tiers.node import Hashes, Node
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.errors import Overloaded, Reason

ROOT_LIMIT = 1024
"""Tenants whose roots are remembered; those of others are computed again."""

_SLACK = 0.05
"""Share of the SSD quota that is freed beyond the need, so that not every spill has to look for victims."""

_PINNED_SHARE = 0.75
"""Share of each tier, and of a tenant's quota of it, that pinned blocks may take; the rest is evictable."""

_PINNED_RETRY_S = 60.0
"""Long, since pins stay until they end or somebody removes them."""


class TenantQuotas:
    """The roots of tenants, and the victims when a tenant takes too much."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._limits = tree.settings.quotas
        self._adapters: dict[AdapterName, AdapterDigest | None] = {NO_ADAPTER: None, **tree.settings.adapters}
        self._roots: OrderedDict[Tenant, dict[AdapterName, BlockHash]] = OrderedDict()
        self._kin: dict[BlockHash, frozenset[BlockHash]] = {}

    def root(self, scope: CacheScope) -> BlockHash:
        """Return h0 for this model, tenant and adapter; the adapter must be one of those served."""
        if scope.tenant not in self._roots:
            self._add(scope.tenant)
        self._roots.move_to_end(scope.tenant)
        return self._roots[scope.tenant][scope.adapter]

    def roots_of(self, tenant: Tenant) -> dict[BlockHash, AdapterDigest | None]:
        """Return all roots of a tenant, each with its adapter; None for the bare model."""
        return {self.root(CacheScope(tenant, name)): digest for name, digest in self._adapters.items()}

    def has_ssd_space(self, owner: Owner, size_bytes: int) -> bool:
        """Whether so many bytes fit into the SSD quota of the tenant with this root, with nothing removed."""
        return not self._limits.ssd_bytes or self._ssd_excess_bytes(owner, size_bytes) <= 0

    def kin_of(self, owner: Owner) -> frozenset[Owner]:
        """Return all roots of the tenant with this root; only this one before the tenant's first request."""
        return frozenset(self._kin.get(owner, (owner,)) if owner is not None else (None,))

    def ram_victims(self, owner: Owner, size_bytes: int, *, protected: Hashes) -> list[Node] | None:
        """Return the owner's oldest blocks that must go from RAM for `size_bytes` more; None if too few."""
        tree, limit, kin = self._tree, self._limits.ram_bytes, self.kin_of(owner)
        excess = sum(tree.ram.used_by[root] for root in kin) + size_bytes - limit
        if not limit or excess <= 0:
            return []
        excess -= sum(node.ram_bytes for node in tree.spilling if node.is_leaving and node.owner in kin)
        return tree.ram.victims(
            excess, may_go=lambda node: node.hash not in protected and not node.is_leaving, owners=kin
        )

    def ssd_victims(self, node: Node, size_bytes: int, *, protected: Hashes) -> list[Node] | None:
        """Return blocks on SSD to remove so that this one stays within its owner's quota; None if too few.

        Least recently used first, tails before heads, and never the blocks before this one.
        """
        if self.has_ssd_space(node.owner, size_bytes):
            return []
        tree, limit, kin = self._tree, self._limits.ssd_bytes, self.kin_of(node.owner)
        excess = self._ssd_excess_bytes(node.owner, size_bytes)
        stay = {node.hash, *protected, *(above.hash for above in tree.ancestors(node))}
        for needed_bytes in (excess + limit * _SLACK, excess):
            chosen = tree.ssd.victims(needed_bytes, may_go=lambda other: other.hash not in stay, owners=kin)
            if chosen is not None:
                return chosen
        return None

    def _ssd_excess_bytes(self, owner: Owner, size_bytes: int) -> int:
        """Return by how many bytes the tenant with this root would exceed its SSD quota with so many more."""
        tree, kin = self._tree, self.kin_of(owner)
        coming_bytes = sum(n.spill.size_bytes for n in tree.spilling if n.spill and n.owner in kin)
        used_bytes = sum(tree.ssd.used_by[root] for root in kin)
        return used_bytes + coming_bytes + size_bytes - self._limits.ssd_bytes

    def check_pins(self, nodes: Iterable[Node]) -> None:
        """Raise Overloaded if pinned blocks, with these, would take too much of a tier or of their quota."""
        added = [node for node in nodes if not node.is_pinned]
        kin = frozenset[Owner]().union(*(self.kin_of(node.owner) for node in added))
        settings, limits, tree = self._tree.settings, self._limits, self._tree
        ram_bytes, ssd_bytes = sum(n.ram_bytes for n in added), sum(n.ssd_bytes for n in added)
        for tier, account, added_bytes, quota_bytes, tier_bytes in (
            ("RAM", tree.ram, ram_bytes, limits.ram_bytes, settings.ram_limit_bytes),
            ("SSD", tree.ssd, ssd_bytes, limits.ssd_bytes, settings.ssd_limit_bytes),
        ):
            own_bytes = added_bytes + sum(account.pinned_by[root] for root in kin)
            all_bytes = added_bytes + account.pinned_by.total()
            _check_pinned_share(tier, own_bytes, quota_bytes or tier_bytes, whose="this tenant")
            _check_pinned_share(tier, all_bytes, tier_bytes, whose="all tenants")

    def snapshot(self) -> tuple[TenantShare, ...]:
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


def _check_pinned_share(tier: str, wanted_bytes: int, limit: int, *, whose: str) -> None:
    limit_bytes = int(limit * _PINNED_SHARE)
    if limit and wanted_bytes > limit_bytes:
        raise Overloaded(
            Reason.MEMORY_SHORT,
            f"pinned blocks of {whose} would take {wanted_bytes} bytes of its {tier}, "
            f"of which {limit_bytes} may be pinned; unpin others, or wait until their pins expire",
            retry_after_s=_PINNED_RETRY_S,
        )
