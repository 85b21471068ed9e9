"""RAM tier: blocks on the device within a byte budget, and which of them are evicted for others.

Inference thread only. A block that leaves for SSD keeps its regions until it is written, or copied to other
memory. Its bytes already count as free; the write queue bounds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain, islice

from icehouse_server.domain.cache_stats import AgePercentiles, TierStats
from icehouse_server.domain.ids import RequestId
from icehouse_server.engine.prefix_cache.tiers.account import Owner
from icehouse_server.engine.prefix_cache.tiers.node import Hashes, Node, Regions
from icehouse_server.engine.prefix_cache.tiers.spill import Spills
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree

_SAMPLE_LIMIT = 4096
"""Blocks sampled for the percentiles of age, evenly over the order of use."""


COPIED_BYTES = 64 << 20
"""Limit of the blocks copied in one step to make space. Running requests wait meanwhile: some 6 ms for 32 MiB
on two x86 cores."""


class RamTier:
    """Keeps the blocks in RAM within the budget; blocks that are leaving do not count."""

    def __init__(self, tree: PrefixTree, *, spills: Spills, quotas: TenantQuotas) -> None:
        self._tree = tree
        self._spills = spills
        self._quotas = quotas
        spills.when_handed_over = self._evict_copied
        self.limit_bytes = tree.settings.ram_limit_bytes
        self.stats = TierStats()
        """Counters of what left the tier since the start."""

    def put(self, node: Node, regions: Regions, *, protected: Hashes, request_id: RequestId) -> None:
        """Add regions of a block if space can be made; blocks that spill for them carry `request_id`."""
        stay, size_bytes = {node.hash, *protected}, sum(region.size_bytes for region in regions.values())
        if self._make_space(size_bytes, protected=stay, owner=node.owner, request_id=request_id):
            self._tree.add_regions(node, regions)

    def has_space(self, regions: Regions) -> bool:
        """Whether these regions fit without evicting another block."""
        size_bytes = sum(region.size_bytes for region in regions.values())
        return self._tree.ram.used_bytes + size_bytes - self.leaving_bytes <= self.limit_bytes

    def note_use(self, nodes: Sequence[Node], *, now: float, request_id: RequestId) -> None:
        """Record that a prompt begins with this chain, so that it stays longer in both tiers."""
        self._tree.touch(nodes, now=now)
        self._spills.touch(nodes)
        self.retain(nodes, request_id)
        for node in nodes:
            node.hit_count += 1

    def supersede(self, node: Node) -> None:
        """Drop shorter blocks from RAM that this one can replace."""
        if node.ram:
            for other in self._tree.superseded(node):
                self._tree.drop(other)

    def yield_bytes(self, size_bytes: int, *, protected: Hashes = (), by_spilling: bool = False) -> int:
        """Release least recently used blocks of at least this size from RAM; return the bytes free now.

        They are dropped, since spilled blocks take memory until they are written. With `by_spilling` they are
        spilled, until enough is free or on its way to SSD, or one step's limit of copies is reached.
        """
        freed_bytes = copied_bytes = 0
        for node in self._to_yield(size_bytes - by_spilling * self.leaving_bytes, protected):
            before_bytes, is_copied = node.ram_bytes, by_spilling and self._spills.wants(node)
            if is_copied and (self._spills.must_wait(node) or copied_bytes >= COPIED_BYTES):
                break  # the queue will have space once it is written, and later steps copy more
            if by_spilling:
                self._release(node, protected=protected, request_id=None)
            else:
                self._evict(node)  # if it was copied, it is still written
            copied_bytes += is_copied * before_bytes
            freed_bytes += before_bytes - node.ram_bytes
        return freed_bytes

    def yieldable_bytes(self, *, protected: Hashes = ()) -> int:
        """Return the bytes that could be freed, including those on their way to SSD."""
        stay = [n for n in self._tree.pinned_in_ram if n.hash in protected or not n.is_safe]
        stay += [n for name in protected if (n := self._tree.get(name)) is not None]
        stay += [node for node in self._tree.spilling if not node.may_leave_now]
        stay_bytes = sum(node.ram_bytes for node in set(stay))
        return self._tree.ram.used_bytes - stay_bytes + self.leaving_bytes

    def retain(self, nodes: Sequence[Node], request_id: RequestId | None) -> list[Node]:
        """Keep blocks that were leaving RAM if others can go instead; return those that still leave."""
        protected = [node.hash for node in nodes]
        for node in nodes:
            if node.spill is not None and node.spill.leaves_ram and node.ram:
                # Its bytes count again while the search for others goes on.
                node.spill.leaves_ram = False
                node.spill.leaves_ram = not self._fits_after_all(node, request_id, protected=protected)
        return [node for node in nodes if node.is_leaving]

    def end_spill(self, node: Node, *, is_pinned_on_ssd: bool) -> None:
        """Clear the state of a block's spill; a block that was leaving is evicted now.

        A pinned block that is not pinned on SSD, since it was not written or not as pinned, stays if it fits.
        """
        spill = self._tree.end_spill(node)
        if spill is not None and spill.leaves_ram:
            may_stay = node.is_pinned and not is_pinned_on_ssd
            if not may_stay or not self._fits_after_all(node, None, protected=(node.hash,)):
                self._evict(node)

    def lose_storage(self) -> None:
        """End all spills, since nothing is written any more; blocks that were leaving are evicted."""
        self._spills.lose_storage()
        # Spills of blocks that stay end first, so that those can be evicted for a pinned one that leaves.
        for node in sorted(self._tree.spilling, key=lambda node: node.is_leaving):
            self.end_spill(node, is_pinned_on_ssd=False)

    def purge(self, node: Node) -> None:
        """Drop a block because a command says so, even a pinned one."""
        self.stats.purged_block_total += self._tree.drop(node)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the blocks that leave RAM when they are written."""
        return sum(node.ram_bytes for node in self._leaving)

    def snapshot(self, *, now: float) -> TierStats:
        account = self._tree.ram
        sample = islice(self._tree.in_ram(), None, None, account.block_count // _SAMPLE_LIMIT + 1)
        return dataclasses.replace(
            self.stats,
            block_count=account.block_count,
            tail_count=account.tail_count,
            pinned_block_count=len(self._tree.pinned_in_ram),
            token_count=account.token_count,
            size_bytes=account.used_bytes,
            limit_bytes=self.limit_bytes,
            age=AgePercentiles.of(max(now - node.last_used_time, 0.0) for node in sample),
        )

    def _make_space(
        self, size_bytes: int, *, protected: Hashes, owner: Owner, request_id: RequestId | None
    ) -> bool:
        """Release blocks until `size_bytes` more of this owner fit into its quota and into the budget.

        False, and nothing changed, if that is impossible. Blocks that spill carry `request_id`.
        """
        own = self._quotas.ram_victims(owner, size_bytes, protected=protected)
        if own is None:
            return False
        going = (*self._leaving, *own)
        stay = {*protected, *(node.hash for node in going)}
        excess = self._tree.ram.used_bytes + size_bytes - sum(n.ram_bytes for n in going) - self.limit_bytes
        others = self._tree.ram.victims(excess, may_go=lambda node: node.hash not in stay)
        if others is None:
            return False
        for victim in (*own, *others):
            self._release(victim, protected=protected, request_id=request_id)
        return True

    def _to_yield(self, size_bytes: int, protected: Hashes) -> list[Node]:
        """Return blocks to release, together of at least this size; pinned blocks safe on SSD come last."""
        chosen: list[Node] = []
        pinned = (node for node in self._tree.pinned_in_ram if node.is_safe)
        for node in chain(self._tree.ram.oldest(), pinned):
            if size_bytes <= 0:
                break
            if node.may_leave_now and node.hash not in protected:
                chosen.append(node)
                size_bytes -= node.ram_bytes
        return chosen

    def _fits_after_all(self, node: Node, request_id: RequestId | None, *, protected: Hashes) -> bool:
        return self._make_space(0, protected=protected, owner=node.owner, request_id=request_id)

    def _release(self, node: Node, *, protected: Hashes, request_id: RequestId | None) -> None:
        """Spill a block, which then leaves RAM once it is written; evict it now if it is not spilled."""
        if not node.is_spilling:
            self._spills.send(node, protected=protected, request_id=request_id)
        if node.spill is not None:
            node.spill.leaves_ram = True
            self._evict_copied(node)
        else:
            self._evict(node)

    def _evict_copied(self, node: Node) -> None:
        """Evict a block that is leaving if it is written from a copy."""
        if node.spill is not None and node.spill.leaves_ram and node.spill.is_copied:
            self._evict(node)

    def _evict(self, node: Node) -> None:
        size_bytes = node.ram_bytes
        if self._tree.drop(node):
            self.stats.evicted_block_total += 1
            self.stats.evicted_byte_total += size_bytes

    @property
    def _leaving(self) -> list[Node]:
        return [node for node in self._tree.spilling if node.is_leaving]
