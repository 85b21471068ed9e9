"""Spills: which block may leave RAM for SSD, credit before anything is copied, what is under way.

Inference thread only. Accepted here means copied to host memory and then handed over, at once or in a later
step; the row is the commit. What is under way is said by the nodes themselves (`Node.spill`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from icehouse_server.domain.blocks import HostBlock, RegionKind
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.engine.prefix_cache.tiers.counters import PrefixCounters
from icehouse_server.engine.prefix_cache.tiers.host_copies import HostCopies
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheRunner, HostCopy, TierWaits
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.storage.api import OVERHEAD_BYTES, ColdTier, Failure, Names, Persisted, Purged, Ticket

_SHORT_CHILD_LIMIT = 64
"""Children of a block below the minimum that are asked whether a longer prefix goes through them."""


class Spills:
    """A `request_id` says on whose account a block is written; None for nobody's."""

    def __init__(
        self,
        tree: PrefixTree,
        *,
        quotas: TenantQuotas,
        counters: PrefixCounters,
        runner: CacheRunner,
        waits: TierWaits,
        ended: Callable[[Node, Persisted | Failure], object],
    ) -> None:
        """`ended` is told of a block that was sent, when it is written or was dropped on its way."""
        self._waits = waits
        self._ended = ended
        self._tree = tree
        self._settings = tree.settings
        self._quotas = quotas
        self._counters = counters
        self._copies = HostCopies(runner)
        self._copying_bytes = 0
        """What blocks that are being copied will take of the write queue."""
        self.when_handed_over: Callable[[Node], None] = lambda node: None
        """Called when the storage thread has the bytes of a block."""
        self._removals: dict[Ticket[Purged], Names] = {}

    @property
    def storage(self) -> ColdTier | None:
        """The SSD tier; None without one, and when it is lost."""
        return self._waits.storage

    @property
    def is_on(self) -> bool:
        return self.storage is not None and self._settings.spill_policy != "off"

    @property
    def under_way_count(self) -> int:
        """Blocks that are copied, or with the storage thread, and not yet written or dropped."""
        return len(self._tree.spilling)

    @property
    def removal_count(self) -> int:
        """Orders to remove blocks from SSD that the storage thread has not carried out yet."""
        return len(self._removals)

    def is_to_be_removed(self, block: BlockHash) -> bool:
        """Whether such an order is on its way to this block."""
        return any(block in blocks for blocks in self._removals.values())

    def remove(self, blocks: Names) -> Ticket[Purged] | None:
        """Order blocks to be removed from SSD; None when too much waits."""
        if self.storage is None:
            return None
        self._copies.finish(blocks)
        ticket = self.storage.delete(blocks)
        if ticket is not None:
            self._removals[ticket] = blocks
            self._waits.add(ticket, lambda _: self._removals.pop(ticket, None))
        return ticket

    def lose_storage(self) -> None:
        """Nothing is written or removed any more."""
        self._waits.storage = None
        self._copies.clear()
        self._copying_bytes = 0
        self._removals.clear()

    def hand_over(self, *, may_wait: bool) -> None:
        """Hand over the blocks that are copied by now; with `may_wait`, which no pass waits for, all."""
        self._copies.proceed(may_wait=may_wait)

    def pin(self, blocks: Names, *, pinned: bool) -> Ticket[Names] | None:
        """Have blocks on SSD, or on their way there, pinned or unpinned; None when too much waits."""
        assert self.storage is not None, "there is no SSD tier"
        self._copies.finish(blocks)
        return self.storage.pin(blocks, pinned=pinned)

    def wants(self, node: Node) -> bool:
        """Whether this block may go to SSD and is not there yet."""
        return self._is_due(node) and not self._is_short(node)

    def has_credit(self, node: Node) -> bool:
        """Whether the write queue takes this block now."""
        size_bytes = node.ram_bytes + OVERHEAD_BYTES
        return self.storage is not None and self._copying_bytes + size_bytes <= self.storage.room_bytes

    @property
    def is_write_behind(self) -> bool:
        """Whether blocks that are used again go to SSD before RAM needs their space."""
        return self._settings.spill_policy == "write_behind"

    def touch(self, nodes: Sequence[Node]) -> None:
        """Note on SSD that a chain was used."""
        stored = tuple(node.hash for node in reversed(nodes) if node.ssd)
        if stored and self.storage is not None:
            self.storage.touch(stored)

    def offer(self, node: Node, *, spared: Collection[BlockHash] = (), request_id: RequestId | None) -> None:
        """Send a block before RAM needs its space; where the write queue is full there is time yet."""
        if self.wants(node) and self.has_credit(node):
            self.send(node, spared=spared, request_id=request_id)

    def send(self, node: Node, *, spared: Collection[BlockHash] = (), request_id: RequestId | None) -> bool:
        """Send a block if it may go and is not there yet; False when it was not sent.

        `spared` are not removed from SSD for it, where its owner's quota is full.
        """
        if not self._is_due(node):
            return False
        if self._is_short(node):
            self._counters.note_drop(SpillDropCause.PREFIX_SHORT)
            return False
        if self.storage is None or not self.has_credit(node):
            self._counters.note_drop(SpillDropCause.NO_CREDIT)
            return False
        size_bytes = node.ram_bytes + OVERHEAD_BYTES
        if not self._fits_quota(node, size_bytes, spared):
            self._counters.note_drop(SpillDropCause.TENANT_SHARE)
            return False
        assert node.token_ids is not None, node.hash.hex()
        header = self._tree.header_of(node, node.token_ids)
        regions = [node.ram[kind] for kind in sorted(node.ram, key=list(RegionKind).index)]
        self._tree.begin_spill(node, size_bytes=size_bytes)
        self._copying_bytes += size_bytes

        def hand_over(copy: HostCopy) -> None:
            assert self.storage is not None and node.spill is not None
            self._copying_bytes -= size_bytes
            block = HostBlock(header, copy.take())
            ticket = self.storage.put(block, pinned=node.is_pinned, request_id=request_id)
            self._waits.add(ticket, partial(self._ended, node))
            node.spill.is_copied = copy.is_apart
            self.when_handed_over(node)

        self._copies.begin(node.hash, regions, hand_over)
        return True

    def _fits_quota(self, node: Node, size_bytes: int, spared: Collection[BlockHash]) -> bool:
        """Remove older blocks of the same owner from SSD where its quota asks for it."""
        victims = self._quotas.ssd_victims(node, size_bytes, spared=spared)
        if victims is None or (victims and self.remove(tuple(victim.hash for victim in victims)) is None):
            return False
        for victim in victims:
            self._tree.forget_stored(victim.hash)
        return True

    def _is_due(self, node: Node) -> bool:
        is_whole = not self._tree.facts.has_kv or RegionKind.KV in node.ram
        # A block on SSD goes again when RAM has all of it and more: a checkpoint that was taken later.
        return self.is_on and is_whole and not node.is_spilling and node.ram_sizes.keys() > node.ssd.keys()

    def _is_short(self, node: Node) -> bool:
        """A prefix below the minimum stays out, unless a longer one needs it."""
        wanted = self._settings.min_prefix_token_count
        if node.end_token_index >= wanted or self._tree.reach(node) >= wanted:
            return False
        # Only a full block has others behind it; of a crowd that is short itself, the latest speak for all.
        full = self._settings.block_token_count
        children = self._tree.children(node.hash, limit=_SHORT_CHILD_LIMIT)
        return all(self._is_short(child) for child in children if child.token_count == full)
