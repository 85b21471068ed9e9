"""Spills: which blocks may go from RAM to SSD, and those under way. Nothing is copied without credit.

An accepted block is copied to host memory and then handed over to the storage thread; the row in the manifest
is the commit. If a pass is in flight the device copies after it, and the copy is handed over in a later step:
nothing waits for it unless an order needs it at once. The write queue's credit bounds the bytes being copied.
`Node.spill` says whether a node is under way. Inference thread only.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader, HostBlock, RegionKind
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.engine.prefix_cache.tiers.node import Hashes, Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheRunner, HostCopy
from icehouse_server.engine.prefix_cache.tiers.storage_waits import StorageWaits
from icehouse_server.engine.prefix_cache.tiers.tenant_quota import TenantQuotas
from icehouse_server.engine.prefix_cache.tiers.tree import PrefixTree
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    BlockPersisted,
    BlocksPurged,
    ColdTier,
    Names,
    StorageFailure,
    Ticket,
)

_log = logging.getLogger("icehouse.engine")

_CHECK_INTERVAL_S = 0.5
"""How often a flush checks whether the storage thread hangs."""
_SHORT_CHILD_LIMIT = 64
"""Children of a too short block that are checked for a longer prefix."""


class _Copying(NamedTuple):
    """A block being copied to host memory; it will take `size_bytes` of the write queue."""

    node: Node
    header: BlockHeader
    size_bytes: int
    copy: HostCopy
    request_id: RequestId | None


class Spills:
    """The spills of one cache. `request_id` is the request that a block is written for, or None."""

    def __init__(
        self,
        tree: PrefixTree,
        *,
        quotas: TenantQuotas,
        runner: CacheRunner,
        waits: StorageWaits,
        ended: Callable[[Node, BlockPersisted | StorageFailure], object],
    ) -> None:
        """`ended` is called for each block that was sent, after it is written or dropped."""
        self._tree = tree
        self._settings = tree.settings
        self._quotas = quotas
        self._runner = runner
        self._waits = waits
        self._ended = ended
        self._copying: collections.deque[_Copying] = collections.deque()
        """In the order of `send`, in which the copies also finish."""
        self._copying_bytes = 0
        """Bytes of the write queue that these will take."""
        self.when_handed_over: Callable[[Node], None] = lambda node: None
        """Called when the storage thread has the bytes of a block."""
        self.is_over: Callable[[Node], bool] = lambda node: False
        """Whether a block's session has ended, so that it is not worth a write."""
        self._removals: dict[Ticket[BlocksPurged], Names] = {}
        self.drop_totals: collections.Counter[SpillDropCause] = collections.Counter()
        """Blocks that were not sent to SSD."""

    @property
    def storage(self) -> ColdTier | None:
        """The SSD tier; None without one, and once it is lost."""
        return self._waits.storage

    @property
    def is_on(self) -> bool:
        return self.storage is not None and self._settings.spill_policy != "off"

    @property
    def is_stalled(self) -> bool:
        """Whether the storage thread hangs."""
        return self._waits.is_stalled

    @property
    def under_way_count(self) -> int:
        """Number of blocks being copied or with the storage thread, not yet written or dropped."""
        return len(self._tree.spilling)

    @property
    def removal_count(self) -> int:
        """Number of removal orders that the storage thread has not carried out yet."""
        return len(self._removals)

    def is_to_be_removed(self, block: BlockHash) -> bool:
        """Whether a pending removal order names this block."""
        return any(block in blocks for blocks in self._removals.values())

    def remove(self, blocks: Names, *, is_final: bool = False) -> Ticket[BlocksPurged] | None:
        """Order blocks to be removed from SSD, with `is_final` also from the store shared with other servers;
        None if the storage thread's queue is full."""
        if self.storage is None:
            return None
        self._finish_copies(blocks)
        ticket = self.storage.delete(blocks, is_final=is_final)
        if ticket is not None:
            self._removals[ticket] = blocks
            self._waits.add(ticket, lambda _: self._removals.pop(ticket, None))
        return ticket

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        """Pin or unpin blocks on SSD or on their way there; None if the storage thread's queue is full."""
        assert self.storage is not None, "there is no SSD tier"
        self._finish_copies(blocks)
        return self.storage.pin(blocks, end_time)

    def settle(self, blocks: Names) -> Ticket[BlocksPurged] | None:
        """Return a ticket that is answered when these blocks and all sent before them are written or dropped;
        None if the storage thread's queue is full."""
        assert self.storage is not None, "there is no SSD tier"
        self._finish_copies(blocks)
        # Deletes nothing, but is carried out after everything that was put before it.
        return self.storage.delete(())

    def adopt(self, node: Node, block: HostBlock) -> Ticket[BlockPersisted]:
        """Write a block that was never in RAM; the write queue must have space for it."""
        assert self.storage is not None, "there is no SSD tier"
        self._tree.begin_spill(node, size_bytes=block.size_bytes + OVERHEAD_BYTES)
        ticket = self.storage.put(block)
        self._waits.add(ticket, partial(self._ended, node))
        return ticket

    def touch(self, nodes: Sequence[Node]) -> None:
        """Note on SSD that a chain was used."""
        stored = tuple(node.hash for node in reversed(nodes) if node.ssd)
        if stored and self.storage is not None:
            self.storage.touch(stored)

    def demote(self, nodes: Sequence[Node]) -> None:
        """Make blocks the next to be evicted from SSD, the last one first; no effect if the queue is full."""
        stored = tuple(node.hash for node in nodes if node.ssd)
        if stored and self.storage is not None:
            self.storage.demote(stored)

    def lose_storage(self) -> None:
        """Forget all copies and removals: the SSD tier is lost."""
        self._waits.storage = None
        self._copying.clear()
        self._copying_bytes = 0
        self._removals.clear()

    def wants(self, node: Node) -> bool:
        """Whether this block may go to SSD and is not there yet."""
        return self._is_due(node) and not self._is_short(node)

    def has_credit(self, node: Node) -> bool:
        """Whether the write queue has space for this block now."""
        return self.has_queue_space(_queue_bytes(node))

    def has_queue_space(self, size_bytes: int) -> bool:
        """Whether the write queue has space for so many bytes besides the blocks being copied."""
        wanted_bytes = self._copying_bytes + size_bytes
        return self.storage is not None and wanted_bytes <= self.storage.queue_space_bytes

    def must_wait(self, node: Node) -> bool:
        """Whether the write queue is too full for this block now, but will have space once it drains. It may
        be full of other models' blocks."""
        size_bytes = _queue_bytes(node)
        can_fit = self.storage is not None and size_bytes <= self.storage.block_limit_bytes
        return can_fit and not self.has_queue_space(size_bytes)

    def offer(self, node: Node, *, request_id: RequestId | None) -> None:
        """Send a block before RAM needs its space, if the write queue has space for it."""
        if self.wants(node) and self.has_credit(node):
            self.send(node, request_id=request_id)

    def send(self, node: Node, *, protected: Hashes = (), request_id: RequestId | None) -> bool:
        """Send a block to SSD if it may go and is not there yet; False if it was not sent.

        If its owner's quota is full, older blocks are removed from SSD for it, but no `protected` ones.
        """
        if not self._is_due(node):
            return False
        size_bytes = _queue_bytes(node)
        cause: SpillDropCause | None = None
        if self._is_short(node):
            cause = SpillDropCause.PREFIX_SHORT
        elif not self.has_credit(node):
            cause = SpillDropCause.NO_CREDIT
        elif not self.fits_quota(node, size_bytes, protected):
            cause = SpillDropCause.TENANT_SHARE
        if cause is not None:
            self.drop_totals[cause] += 1
            return False
        assert node.token_ids is not None, node.hash.hex()
        header = self._tree.header_of(node, node.token_ids)
        regions = [node.ram[kind] for kind in RegionKind if kind in node.ram]
        self._tree.begin_spill(node, size_bytes=size_bytes)
        self._copying_bytes += size_bytes
        copy = self._runner.begin_to_host(regions)
        self._copying.append(_Copying(node, header, size_bytes, copy, request_id))
        self.hand_over(may_wait=False)
        return True

    def hand_over(self, *, may_wait: bool) -> None:
        """Hand over the blocks whose copies are finished; with `may_wait`, which no pass waits for, all."""
        while self._copying and (may_wait or self._copying[0].copy.is_done):
            self._hand_over_next()

    def _finish_copies(self, blocks: Names) -> None:
        """Hand over these blocks and those before them now: an order that names them follows."""
        while any(each.node.hash in blocks for each in self._copying):
            self._hand_over_next()

    def _hand_over_next(self) -> None:
        node, header, size_bytes, copy, request_id = self._copying.popleft()
        assert self.storage is not None and node.spill is not None
        self._copying_bytes -= size_bytes
        block = HostBlock(header, copy.take())
        ticket = self.storage.put(block, pin_end_time=node.pin_end_time, request_id=request_id)
        self._waits.add(ticket, partial(self._ended, node))
        node.spill.is_copied = copy.is_apart
        self.when_handed_over(node)

    def fits_quota(self, node: Node, size_bytes: int, protected: Hashes) -> bool:
        """Whether a block fits its owner's SSD quota; removes older blocks of the owner if that takes it."""
        victims = self._quotas.ssd_victims(node, size_bytes, protected=protected)
        if victims is None or (victims and self.remove(tuple(victim.hash for victim in victims)) is None):
            return False
        for victim in victims:
            self._tree.forget_stored(victim.hash)
        return True

    def _is_due(self, node: Node) -> bool:
        is_whole = not self._tree.facts.has_kv or RegionKind.KV in node.ram
        # A block on SSD is written again if RAM has all of it and more: a checkpoint that was taken later.
        is_news = is_whole and not node.is_spilling and node.ram_sizes.keys() > node.ssd.keys()
        return self.is_on and is_news and (node.is_pinned or not self.is_over(node))

    def _is_short(self, node: Node) -> bool:
        """Whether a block ends a prefix below the minimum, and is part of no longer one."""
        wanted = self._settings.min_prefix_token_count
        if node.end_token_index >= wanted or self._tree.reach(node) >= wanted:
            return False
        # Only full blocks have children. If there are many, the latest stand for all.
        full = self._settings.block_token_count
        children = self._tree.children(node.hash, limit=_SHORT_CHILD_LIMIT)
        return all(self._is_short(child) for child in children if child.token_count == full)


def _queue_bytes(node: Node) -> int:
    """Return the bytes that a block takes of the write queue and of its owner's SSD quota."""
    return node.ram_bytes + OVERHEAD_BYTES


def flush(
    spills: Spills,
    nodes: Iterable[Node],
    *,
    clock: Clock,
    deadline_time: float,
) -> Iterator[float]:
    """Spill those of `nodes` that SSD lacks, the last one first, after a drain; log the result.

    Ends when all are written or dropped, at the deadline, or when the storage thread hangs. Yields the most
    seconds that the caller may wait for that thread's reports before it receives them and continues.
    """
    began_time = clock.monotonic()
    waiting = [node for node in nodes if spills.wants(node)]
    block_count = left_count = len(waiting) + spills.under_way_count
    if not block_count:
        return
    _log.info("flush_started", extra={"block_count": block_count})
    while True:
        while waiting and not spills.must_wait(waiting[-1]):
            spills.send(waiting.pop(), request_id=None)
        spills.hand_over(may_wait=True)
        left_count, left_s = len(waiting) + spills.under_way_count, deadline_time - clock.monotonic()
        if not left_count or left_s <= 0.0 or spills.is_stalled:
            break
        yield min(_CHECK_INTERVAL_S, left_s)
    facts = {"block_count": block_count - left_count, "left_count": left_count}
    _log.info("flush_ended", extra={**facts, "duration_s": round(clock.monotonic() - began_time, 3)})
