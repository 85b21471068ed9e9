"""Exchange: export of blocks as bytes, and import of blocks of the same model from elsewhere.

Inference thread only; it reads and writes no file. An export loads a block to host memory; an import goes
through the queue of the spills. So names, keys, limits and the order of a commit are those of every other
block. A caller has one block under way at a time, which bounds the memory.
"""

from __future__ import annotations

from typing import Any, TypeVar

from icehouse_server.domain.blocks import BlockDamage, HostBlock
from icehouse_server.domain.cache_commands import (
    AdoptBlock,
    AdoptionRefusal,
    BeginImport,
    BlockAdoption,
    BlockContent,
    CacheAnswer,
    ExportBlock,
    ExportBlocks,
    ImportTerms,
    ListExport,
    ReadBlock,
)
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.prefix_cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Awaited, Steps
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    BlockPersisted,
    ColdTier,
    PlannedBlock,
    StorageFailure,
    Ticket,
)

ExchangeCommand = ListExport | ReadBlock | BeginImport | AdoptBlock
_Result = TypeVar("_Result")
_BUSY_RETRY_S = 1.0


class CacheExchange:
    """Carries out the commands of exports and imports on one prefix cache."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._tree = cache.tree
        self._block_limit_bytes = 0 if cache.storage is None else cache.storage.block_limit_bytes

    def answer(self, command: ExchangeCommand) -> Steps[CacheAnswer]:
        """Answer a command. Raises IcehouseError if it is refused."""
        if not self._cache.spills.is_on:
            raise IcehouseError(
                Reason.CACHE_UNSUPPORTED,
                "this server writes no blocks to SSD, so it can neither export nor import",
            )
        match command:
            case ListExport():
                return self._list(command)
            case ReadBlock():
                return (yield from self._read(command.block_hash))
            case BeginImport():
                return ImportTerms(self._cache.settings.block_token_count, self._block_limit_bytes)
            case AdoptBlock():
                return (yield from self._adopt(command))

    def _list(self, command: ListExport) -> ExportBlocks:
        cache, tenant = self._cache, command.scope.tenant
        roots = cache.quotas.roots_of(tenant)
        if command.prompt_token_ids is None:
            nodes = [node for node in self._tree if node.owner in roots]
        else:
            root = cache.quotas.root(command.scope)
            nodes = cache.known_chain(command.prompt_token_ids, command.scope)
            cache.tree.claim(nodes, root)
        blocks: dict[BlockHash, ExportBlock] = {}
        for node in sorted(nodes, key=lambda node: node.start_token_index):
            if node.owner is not None and (node.parent in blocks or node.parent in roots):
                adapter = roots[node.owner]
                blocks[node.hash] = ExportBlock(node.hash, node.parent, node.start_token_index, adapter)
        return ExportBlocks(tuple(blocks.values()), cache.settings.block_token_count)

    def _read(self, name: BlockHash) -> Steps[BlockContent]:
        """Read a block from SSD; a block in RAM alone is written there first."""
        node, spills = self._node(name), self._cache.spills
        if not node.is_safe:
            # If it cannot be sent now, it may be once the queue is empty.
            if not node.is_spilling:
                spills.send(node, request_id=None)
            yield from _done(spills.settle((name,)))
            node = self._node(name)
            if not node.ssd and spills.send(node, request_id=None):
                yield from _done(spills.settle((name,)))
                node = self._node(name)
        if not node.ssd:
            raise _not_found(name)
        if node.token_ids is not None:
            header = self._tree.header_of(node, node.token_ids)
        else:
            headers = yield from _done(self._storage.heads((name,)), token_count=0)
            if not headers:
                raise _not_found(name)
            header = headers[0]
        planned = [PlannedBlock(header, frozenset(node.ssd))]
        loaded = yield from _done(self._storage.get_into(planned, None), token_count=0)
        return BlockContent(HostBlock(header, loaded.blocks[0].regions))

    def _node(self, name: BlockHash) -> Node:
        node = self._tree.get(name)
        if node is None:
            raise _not_found(name)
        return node

    def _adopt(self, command: AdoptBlock) -> Steps[BlockAdoption]:
        """Write an imported block to SSD; if the queue is full, once it has drained."""
        roots = self._cache.quotas.roots_of(command.tenant)
        root = next((name for name, digest in roots.items() if digest == command.adapter), None)
        parent = command.parent or root
        if root is None or parent is None:
            return BlockAdoption(BlockHash(b""), refusal=AdoptionRefusal.SCOPE)
        name, spills = self._tree.name_of(parent, command.keys), self._cache.spills
        size_bytes = sum(region.size_bytes for region in command.regions) + OVERHEAD_BYTES
        for may_wait in (True, False):
            node = self._tree.get(name)
            if node is not None and (node.ram or node.ssd or node.is_spilling):
                return BlockAdoption(name)
            refusal = self._refusal_of(command, root, parent, size_bytes)
            if refusal is not None:
                return BlockAdoption(name, refusal=refusal)
            if spills.has_queue_space(size_bytes):
                break
            if not may_wait:
                raise _busy("the SSD tier's write queue is full of other models' blocks")
            yield from _done(spills.settle(()))
        node = self._tree.insert(
            parent=parent, start_token_index=command.start_token_index, keys=command.keys
        )
        self._tree.claim([node], root)
        block = HostBlock(self._tree.header_of(node, command.keys), command.regions)
        is_written = isinstance((yield Awaited(spills.adopt(node, block))), BlockPersisted)
        return BlockAdoption(
            name, is_new=is_written, refusal=None if is_written else AdoptionRefusal.SSD_FULL
        )

    def _refusal_of(
        self, command: AdoptBlock, root: BlockHash, parent: BlockHash, size_bytes: int
    ) -> AdoptionRefusal | None:
        """Return why a new block must not be imported, None if it may. Nothing is evicted for it."""
        settings, tree = self._cache.settings, self._tree
        above = tree.get(parent)
        begins_at = 0 if parent == root else above and above.end_token_index
        is_aligned = command.start_token_index % settings.block_token_count == 0
        if begins_at != command.start_token_index or not is_aligned or (above and above.owner != root):
            return AdoptionRefusal.PARENT_MISSING
        token_count = len(command.keys)
        if not 0 < token_count <= settings.block_token_count:
            return AdoptionRefusal.DAMAGED
        if self._cache.runner.misfit(command.regions, token_count=token_count):
            return AdoptionRefusal.LAYOUT
        if not self._cache.quotas.has_ssd_space(root, size_bytes):
            return AdoptionRefusal.QUOTA
        coming_bytes = sum(node.spill.size_bytes for node in tree.spilling if node.spill)
        limit_bytes = settings.ssd_limit_bytes
        if size_bytes > self._block_limit_bytes:
            return AdoptionRefusal.SSD_FULL
        if limit_bytes and tree.ssd.used_bytes + coming_bytes + size_bytes > limit_bytes:
            return AdoptionRefusal.SSD_FULL
        return None

    @property
    def _storage(self) -> ColdTier:
        storage = self._cache.storage
        if storage is None:
            raise _busy("the SSD tier has stopped")
        return storage


def _done(ticket: Ticket[_Result] | None, *, token_count: int | None = None) -> Steps[_Result]:
    """Wait for a ticket and return its result. Raises NotFound for a damaged block, else Overloaded."""
    if ticket is None:
        raise _busy("the SSD tier's queue is full")
    outcome: Any = yield Awaited(ticket, token_count)
    if isinstance(outcome, StorageFailure):
        if isinstance(outcome.cause, BlockDamage):
            raise _not_found(outcome.hash or BlockHash(b""))
        raise _busy(f"the SSD tier cannot do this now: {outcome.detail or outcome.cause}")
    result: _Result = outcome
    return result


def _not_found(name: BlockHash) -> NotFound:
    return NotFound(Reason.BLOCK_NOT_FOUND, f"block {name.hex()} cannot be read from SSD; it is left out")


def _busy(why: str) -> Overloaded:
    return Overloaded(Reason.QUEUE_FULL, f"{why}; try again later", retry_after_s=_BUSY_RETRY_S)
