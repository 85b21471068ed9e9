"""Exchange: blocks that leave this cache as bytes, and blocks of the same model that come from elsewhere.

Inference thread only; it reads and writes no file. A block leaves by a load to host memory, and comes by the
queue that spills go through: so names, keys, limits and the order of a commit are those of every other block.
Whoever asks has one block under way at a time, which bounds the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from icehouse_server.domain.blocks import BlockHeader, Damage, HostBlock
from icehouse_server.domain.cache_commands import (
    AdoptBlock,
    Adoption,
    AdoptionRefusal,
    BeginImport,
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
from icehouse_server.errors import IcehouseError, NotFound, Overloaded, Reason
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    ColdTier,
    Failure,
    Loaded,
    Persisted,
    PlannedBlock,
    Ticket,
)

Reply = Callable[[CacheAnswer | IcehouseError], None]
ExchangeCommand = ListExport | ReadBlock | BeginImport | AdoptBlock
_BUSY_RETRY_S = 1.0


class CacheExchange:
    """Carries out the commands of exports and imports on one prefix cache."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._tree = cache.tree
        self._block_limit_bytes = 0 if cache.storage is None else cache.storage.block_limit_bytes

    def answer(self, command: ExchangeCommand, reply: Reply) -> CacheAnswer | None:
        """Answer a command now, or by `reply` when the SSD tier has done its part. Raises what refuses it."""
        if not self._cache.spills.is_on:
            raise IcehouseError(
                Reason.CACHE_UNSUPPORTED,
                "this server writes no blocks to SSD, so it can neither export nor import",
            )
        match command:
            case ListExport():
                return self._list(command)
            case ReadBlock():
                self._read(command.block_hash, reply, may_wait=True)
            case BeginImport():
                return ImportTerms(self._cache.settings.block_token_count, self._block_limit_bytes)
            case AdoptBlock():
                return self._adopt(command, reply, may_wait=True)
        return None

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

    # A block that leaves.

    def _read(self, name: BlockHash, reply: Reply, *, may_wait: bool) -> None:
        """Read a block; one that RAM alone has is written first, once."""
        node, spills = self._tree.get(name), self._cache.spills
        if node is None:
            raise _not_found(name)
        if may_wait and not node.is_safe:
            # A block that cannot be sent now may be once the queue is empty.
            if not node.is_spilling:
                spills.send(node, request_id=None)
            self._wait(spills.settle((name,)), partial(self._read_again, name, reply), reply)
        elif node.ssd:
            self._load(node, reply)
        elif may_wait or not spills.send(node, request_id=None):
            raise _not_found(name)
        else:
            self._wait(spills.settle((name,)), partial(self._read_written, name, reply), reply)

    def _read_again(self, name: BlockHash, reply: Reply) -> None:
        self._read(name, reply, may_wait=False)

    def _read_written(self, name: BlockHash, reply: Reply) -> None:
        node = self._tree.get(name)
        if node is None or not node.ssd:
            raise _not_found(name)
        self._load(node, reply)

    def _load(self, node: Node, reply: Reply) -> None:
        if node.token_ids is not None:
            self._load_with(self._tree.header_of(node, node.token_ids), node, reply)
            return
        ticket = self._storage.heads((node.hash,))

        def learn() -> None:
            headers = ticket.outcome if ticket is not None else ()
            assert isinstance(headers, tuple)
            if not headers:
                raise _not_found(node.hash)
            self._load_with(headers[0], node, reply)

        self._wait(ticket, learn, reply, is_read=True)

    def _load_with(self, header: BlockHeader, node: Node, reply: Reply) -> None:
        ticket = self._storage.get_into([PlannedBlock(header, frozenset(node.ssd))], None)

        def loaded() -> None:
            outcome = ticket.outcome if ticket is not None else None
            assert isinstance(outcome, Loaded)
            reply(BlockContent(HostBlock(header, outcome.blocks[0].regions)))

        self._wait(ticket, loaded, reply, is_read=True)

    # A block that comes.

    def _adopt(self, command: AdoptBlock, reply: Reply, *, may_wait: bool) -> CacheAnswer | None:
        roots = self._cache.quotas.roots_of(command.tenant)
        root = next((name for name, digest in roots.items() if digest == command.adapter), None)
        parent = command.parent or root
        if root is None or parent is None:
            return Adoption(BlockHash(b""), refusal=AdoptionRefusal.SCOPE)
        name = self._tree.name_of(parent, command.keys)
        node = self._tree.get(name)
        if node is not None and (node.ram or node.ssd or node.is_spilling):
            return Adoption(name)
        size_bytes = sum(region.size_bytes for region in command.regions) + OVERHEAD_BYTES
        refusal = self._refusal_of(command, root, parent, size_bytes)
        if refusal is not None:
            return Adoption(name, refusal=refusal)
        spills = self._cache.spills
        if not spills.has_queue_space(size_bytes):
            if not may_wait:
                raise _busy("the SSD tier's write queue is full of other models' blocks")
            self._wait(spills.settle(()), partial(self._adopt_again, command, reply), reply)
            return None
        node = self._tree.insert(
            parent=parent, start_token_index=command.start_token_index, keys=command.keys
        )
        self._tree.claim([node], root)
        block = HostBlock(self._tree.header_of(node, command.keys), command.regions)
        ticket = spills.adopt(node, block)

        def ended(outcome: Persisted | Failure) -> None:
            is_written = isinstance(outcome, Persisted)
            refusal = None if is_written else AdoptionRefusal.SSD_FULL
            reply(Adoption(name, is_new=is_written, refusal=refusal))

        self._cache.waits.add(ticket, ended)
        return None

    def _adopt_again(self, command: AdoptBlock, reply: Reply) -> None:
        answer = self._adopt(command, reply, may_wait=False)
        if answer is not None:
            reply(answer)

    def _refusal_of(
        self, command: AdoptBlock, root: BlockHash, parent: BlockHash, size_bytes: int
    ) -> AdoptionRefusal | None:
        """Return why a block that is not here may not come. Nothing is removed for it."""
        settings, tree = self._cache.settings, self._tree
        above = tree.get(parent)
        begins_at = 0 if parent == root else above and above.end_token_index
        is_aligned = command.start_token_index % settings.block_token_count == 0
        if begins_at != command.start_token_index or not is_aligned or (above and above.owner != root):
            return AdoptionRefusal.PARENT_MISSING
        token_count = len(command.keys)
        if not 0 < token_count <= settings.block_token_count:
            return AdoptionRefusal.DAMAGED
        if self._cache.misfit(command.regions, token_count=token_count):
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

    # Tickets.

    @property
    def _storage(self) -> ColdTier:
        storage = self._cache.storage
        if storage is None:
            raise _busy("the SSD tier has stopped")
        return storage

    def _wait(
        self,
        ticket: Ticket[Any] | None,
        then: Callable[[], object],
        reply: Reply,
        *,
        is_read: bool = False,
    ) -> None:
        """Go on when a ticket has come. What fails, or raises, is the reply."""
        if ticket is None:
            raise _busy("the SSD tier has too much queued")

        def go_on(outcome: object) -> None:
            try:
                if isinstance(outcome, Failure):
                    if isinstance(outcome.cause, Damage):
                        raise _not_found(outcome.hash or BlockHash(b""))
                    raise _busy(f"the SSD tier cannot do this now: {outcome.detail or outcome.cause}")
                then()
            except IcehouseError as error:
                reply(error)

        self._cache.waits.add(ticket, go_on, token_count=0 if is_read else None)


def _not_found(name: BlockHash) -> NotFound:
    return NotFound(Reason.BLOCK_NOT_FOUND, f"block {name.hex()} cannot be read from SSD; it is left out")


def _busy(why: str) -> Overloaded:
    return Overloaded(Reason.QUEUE_FULL, f"{why}; try again later", retry_after_s=_BUSY_RETRY_S)
