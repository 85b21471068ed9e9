"""Spills: which blocks may leave RAM for SSD, with credit before anything is copied, and what is under way.

A block that is accepted is copied to host memory and then handed over to the storage thread; the row in its
manifest is the commit. Where a pass is in flight the copy is made behind it, and handed over in a later step:
nothing waits for it unless it must be there at once. The write queue's credit bounds the bytes being copied.
Each node says whether it is under way (`Node.spill`). Inference thread only.
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
from icehouse_server.storage.api import OVERHEAD_BYTES, ColdTier, Failure, Names, Persisted, Purged, Ticket

_log = logging.getLogger("icehouse.engine")

_CHECK_INTERVAL_S = 0.5
"""How often a flush checks whether the storage thread hangs."""
_SHORT_CHILD_LIMIT = 64
"""Children of a block below the minimum that are checked for a longer prefix."""


class _Copying(NamedTuple):
    """A block on its way to host memory; it will take `size_bytes` of the write queue."""

    node: Node
    header: BlockHeader
    size_bytes: int
    copy: HostCopy
    request_id: RequestId | None


class Spills:
    """The spills of one cache. A `request_id` says for which request a block is written; None for none."""

    def __init__(
        self,
        tree: PrefixTree,
        *,
        quotas: TenantQuotas,
        runner: CacheRunner,
        waits: StorageWaits,
        ended: Callable[[Node, Persisted | Failure], object],
    ) -> None:
        """`ended` is called for each block that was sent, once it is written or dropped."""
        self._tree = tree
        self._settings = tree.settings
        self._quotas = quotas
        self._runner = runner
        self._waits = waits
        self._ended = ended
        self._copying: collections.deque[_Copying] = collections.deque()
        """In the order of `send`, in which the copies also end."""
        self._copying_bytes = 0
        """What these will take of the write queue."""
        self.when_handed_over: Callable[[Node], None] = lambda node: None
        """Called when the storage thread has the bytes of a block."""
        self.is_over: Callable[[Node], bool] = lambda node: False
        """Whether nobody needs a block any more, so that it is not worth a write."""
        self._removals: dict[Ticket[Purged], Names] = {}
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
        """Blocks that are being copied or with the storage thread, and not yet written or dropped."""
        return len(self._tree.spilling)

    @property
    def removal_count(self) -> int:
        """Orders to remove blocks from SSD that the storage thread has not carried out yet."""
        return len(self._removals)

    def is_to_be_removed(self, block: BlockHash) -> bool:
        """Whether such an order names this block."""
        return any(block in blocks for blocks in self._removals.values())

    def remove(self, blocks: Names, *, is_final: bool = False) -> Ticket[Purged] | None:
        """Order blocks to be removed from SSD, and with `is_final` from where other servers could fetch them;
        None when the storage thread's queue is full."""
        if self.storage is None:
            return None
        self._finish_copies(blocks)
        ticket = self.storage.delete(blocks, is_final=is_final)
        if ticket is not None:
            self._removals[ticket] = blocks
            self._waits.add(ticket, lambda _: self._removals.pop(ticket, None))
        return ticket

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        """Have blocks on SSD, or on their way there, pinned or unpinned; None when the queue is full."""
        assert self.storage is not None, "there is no SSD tier"
        self._finish_copies(blocks)
        return self.storage.pin(blocks, end_time)

    def settle(self, blocks: Names) -> Ticket[Purged] | None:
        """Return a ticket that comes when these blocks, and all sent before, are written or dropped; None
        when the storage thread's queue is full."""
        assert self.storage is not None, "there is no SSD tier"
        self._finish_copies(blocks)
        # An order for nothing: it waits for what was put before it.
        return self.storage.delete(())

    def adopt(self, node: Node, block: HostBlock) -> Ticket[Persisted]:
        """Write a block that was never in RAM; there must be credit for it."""
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
        """Make blocks the next to go from SSD, the last one first; where too much is queued, they stay."""
        stored = tuple(node.hash for node in nodes if node.ssd)
        if stored and self.storage is not None:
            self.storage.demote(stored)

    def lose_storage(self) -> None:
        """Nothing is written or removed any more."""
        self._waits.storage = None
        self._copying.clear()
        self._copying_bytes = 0
        self._removals.clear()

    def wants(self, node: Node) -> bool:
        """Whether this block may go to SSD and is not there yet."""
        return self._is_due(node) and not self._is_short(node)

    def has_credit(self, node: Node) -> bool:
        """Whether the write queue takes this block now."""
        return self.has_queue_space(_queue_bytes(node))

    def has_queue_space(self, size_bytes: int) -> bool:
        """Whether the write queue takes so many bytes now, beside the blocks that are being copied."""
        wanted_bytes = self._copying_bytes + size_bytes
        return self.storage is not None and wanted_bytes <= self.storage.queue_space_bytes

    def must_wait(self, node: Node) -> bool:
        """Whether the write queue has no space for this block now, and will have: this model's blocks are in
        it, or those of others."""
        size_bytes = _queue_bytes(node)
        can_fit = self.storage is not None and size_bytes <= self.storage.block_limit_bytes
        return can_fit and not self.has_queue_space(size_bytes)

    def offer(self, node: Node, *, request_id: RequestId | None) -> None:
        """Send a block before RAM needs its space; where the write queue is full, it can wait."""
        if self.wants(node) and self.has_credit(node):
            self.send(node, request_id=request_id)

    def send(self, node: Node, *, protected: Hashes = (), request_id: RequestId | None) -> bool:
        """Send a block if it may go and is not there yet; False when it was not sent.

        `protected` blocks are not removed from SSD for it, where its owner's quota is full.
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
        """Hand over the blocks that are copied by now; with `may_wait`, which no pass waits for, all."""
        while self._copying and (may_wait or self._copying[0].copy.is_done):
            self._hand_over_next()

    def _finish_copies(self, blocks: Names) -> None:
        """Hand over these blocks, and those before them, now: an order about them follows."""
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
        """Remove older blocks of the same owner from SSD where its quota requires it."""
        victims = self._quotas.ssd_victims(node, size_bytes, protected=protected)
        if victims is None or (victims and self.remove(tuple(victim.hash for victim in victims)) is None):
            return False
        for victim in victims:
            self._tree.forget_stored(victim.hash)
        return True

    def _is_due(self, node: Node) -> bool:
        is_whole = not self._tree.facts.has_kv or RegionKind.KV in node.ram
        # A block on SSD goes again when RAM has all of it and more: a checkpoint that was taken later.
        is_news = is_whole and not node.is_spilling and node.ram_sizes.keys() > node.ssd.keys()
        return self.is_on and is_news and (node.is_pinned or not self.is_over(node))

    def _is_short(self, node: Node) -> bool:
        """Whether it ends a prefix below the minimum, and no longer one goes through it."""
        wanted = self._settings.min_prefix_token_count
        if node.end_token_index >= wanted or self._tree.reach(node) >= wanted:
            return False
        # Only full blocks have others behind them. Of many short ones, the latest stand for all.
        full = self._settings.block_token_count
        children = self._tree.children(node.hash, limit=_SHORT_CHILD_LIMIT)
        return all(self._is_short(child) for child in children if child.token_count == full)


def _queue_bytes(node: Node) -> int:
    """Return what a block takes of the write queue, and of its owner's quota on SSD."""
    return node.ram_bytes + OVERHEAD_BYTES


def flush(
    spills: Spills,
    nodes: Iterable[Node],
    *,
    clock: Clock,
    deadline_time: float,
) -> Iterator[float]:
    """Spill what SSD lacks of `nodes` after a drain, the last one first, and log the result.

    It ends when all is written or dropped, at the deadline, or when the storage thread is stalled. Yields
    for how many seconds at most that thread's reports may be waited for; they are to be taken in then.
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
