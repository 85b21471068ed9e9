"""Cache transfer: exports blocks to a caller as an archive and imports an archive's blocks (event loop).

Each call handles one block at a time and hashes in the tokenizer's threads, 1 MiB at a time. In an archive,
blocks have the names that they would have without a key, below the root of the tenant that they come from.
Here they get the names of the tenant that they go to. So nothing in an archive decides where a block is
filed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial

from icehouse.v1 import cache_service_pb2 as messages

from icehouse_server.domain.blocks import BlockHeader, HostBlock, TokenKeys, block_hash, join_keys, root_hash
from icehouse_server.domain.cache_commands import (
    AdoptBlock,
    AdoptionRefusal,
    BeginImport,
    BlockAdoption,
    BlockContent,
    ExportBlock,
    ExportBlocks,
    ImportTerms,
    ListExport,
    ReadBlock,
)
from icehouse_server.domain.ids import AdapterDigest, BlockHash, CacheScope, Fingerprint, Tenant
from icehouse_server.errors import DeadlineExceeded, IcehouseError, NotFound, Overloaded, Reason
from icehouse_server.rpc.engine_client.answers import StallTimer, Writable
from icehouse_server.rpc.engine_client.engine_cache import Answer, EngineCache
from icehouse_server.rpc.engine_client.engine_ports import BlockFiles, ServedModel
from icehouse_server.rpc.engine_client.seat import Seat
from icehouse_server.rpc.messages.proto_map import enum_proto
from icehouse_server.rpc.services.prompts import PromptReader
from icehouse_server.storage.archive import (
    ArchiveError,
    ArchiveHeader,
    ArchiveReader,
    ArchiveWriter,
    BlockEnd,
    BlockEntry,
    Item,
)

CHUNK_BYTES = 1 << 20
_TRANSFER_LIMIT = 4
"""Concurrent exports and imports, each with a block in memory."""
_RETRY_S = 1.0
_TRY_COUNT = 5
"""How often a read of a block is tried while too much is queued."""
_ADOPT_TRY_COUNT = 60
"""The same for an imported block: a caller may have no deadline."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """What an archive must match."""

    fingerprint: Fingerprint
    files: BlockFiles
    adapters: frozenset[AdapterDigest]

    @classmethod
    def of(cls, model: ServedModel) -> _Model:
        if model.block_files is None:
            raise IcehouseError(Reason.CACHE_UNSUPPORTED, "this server has no SSD tier to export or import")
        adapters = frozenset(adapter.digest for adapter in model.info.adapters)
        return cls(Fingerprint(bytes.fromhex(model.info.fingerprint_hex)), model.block_files, adapters)


class CacheTransfer:
    """Exports and imports for the cache service."""

    def __init__(self, *, prompts: PromptReader, timeout_s: float) -> None:
        """A caller that sends nothing for `timeout_s` is dropped."""
        self.prompts = prompts
        self._timeout_s = timeout_s
        self._running_count = 0

    async def export(
        self,
        keys: TokenKeys | None,
        scope: CacheScope,
        *,
        seat: Seat,
        context: Writable,
        timer: StallTimer,
    ) -> None:
        """Write the archive of a prompt, or of a tenant if `keys` is None. Call within the timer's guard."""
        model, commands = seat.router.require_model(), seat.commands
        served = _Model.of(model)
        with self._slot():
            listed = await commands.ask(ListExport(keys, scope), ExportBlocks)
            if not listed.blocks:
                raise NotFound(
                    Reason.BLOCK_NOT_FOUND, "nothing of it is cached; send it through Warm or Generate"
                )
            writer, named = ArchiveWriter(), _Names(scope.tenant, served.fingerprint)
            details = {"model": model.info.model_id}
            header = ArchiveHeader(served.fingerprint, listed.block_token_limit, details)
            await timer.write(context, messages.ExportResponse(chunk=writer.begin(header)))
            result = messages.ExportResult()
            for block in listed.blocks:
                content = await self._read(commands, block) if named.reaches(block) else None
                if content is None:
                    result.left_out_block_count += 1
                    continue
                named_block = named.name(block, content)
                # The block was read: free it before the next one is read.
                del content
                parts = await self.prompts.run(partial(served.files.encode, named_block))
                size_bytes = sum(part.nbytes for part in parts)
                entry = _entry(named_block.header, size_bytes, block.adapter)
                await timer.write(context, messages.ExportResponse(chunk=writer.block(entry)))
                for chunk in _chunks(parts):
                    await self.prompts.run(partial(writer.part, chunk))
                    await timer.write(context, messages.ExportResponse(chunk=chunk))
                await timer.write(context, messages.ExportResponse(chunk=writer.end_block()))
                result.block_count += 1
                result.size_bytes += size_bytes
            await timer.write(context, messages.ExportResponse(chunk=writer.end()))
            await timer.write(context, messages.ExportResponse(done=result))

    async def adopt(
        self, requests: AsyncIterator[messages.ImportRequest], tenant: Tenant, *, seat: Seat
    ) -> messages.ImportResponse:
        """Adopt the archive that follows in `requests`."""
        served = _Model.of(seat.router.require_model())
        with self._slot():
            terms = await seat.commands.ask(BeginImport(), ImportTerms)
            adoption = _Adoption(self, served, terms, tenant, seat.commands)
            while (request := await self.next_of(requests)) is not None:
                items, stop_detail = await self.prompts.run(partial(adoption.feed, request.chunk))
                for item in items:
                    await adoption.take(item)
                if stop_detail:
                    return adoption.response(stop_detail)
            return adoption.response(adoption.end_detail())

    async def next_of(self, requests: AsyncIterator[messages.ImportRequest]) -> messages.ImportRequest | None:
        """Return the next message; None at the end. Raises DeadlineExceeded if none comes in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded(
                Reason.MESSAGE_LATE,
                f"no data of the archive arrived for {self._timeout_s:g} s; send it faster",
                metadata={"stall_timeout_s": f"{self._timeout_s:g}"},
            ) from None

    async def _read(self, commands: EngineCache, block: ExportBlock) -> HostBlock | None:
        """Return a block; None if it is gone or damaged."""
        try:
            return (await self.patiently(commands, ReadBlock(block.hash), BlockContent)).block
        except NotFound:
            return None

    async def patiently(
        self,
        commands: EngineCache,
        command: ReadBlock | AdoptBlock,
        answer_type: type[Answer],
        *,
        try_count: int = _TRY_COUNT,
    ) -> Answer:
        """Retry a command while too much is queued; finally raises Overloaded."""
        for _ in range(try_count - 1):
            with contextlib.suppress(Overloaded):
                return await commands.ask(command, answer_type)
            await asyncio.sleep(_RETRY_S)
        return await commands.ask(command, answer_type)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        if self._running_count >= _TRANSFER_LIMIT:
            raise Overloaded(
                Reason.QUEUE_FULL,
                f"{_TRANSFER_LIMIT} exports and imports are under way; try again later",
                retry_after_s=_RETRY_S,
                metadata={"limit": _TRANSFER_LIMIT},
            )
        self._running_count += 1
        try:
            yield
        finally:
            self._running_count -= 1


class _Names:
    """Maps the names of the archive's blocks so far: name on this server to name in the archive."""

    def __init__(self, tenant: Tenant, fingerprint: Fingerprint) -> None:
        self._tenant = tenant
        self._fingerprint = fingerprint
        self._known: dict[BlockHash, BlockHash] = {}

    def reaches(self, block: ExportBlock) -> bool:
        """Whether the archive has the parent of this block."""
        return block.start_token_index == 0 or block.parent in self._known

    def name(self, block: ExportBlock, content: HostBlock) -> HostBlock:
        """Return a block under its name in the archive."""
        if block.start_token_index:
            parent = self._known[block.parent]
        else:
            parent = root_hash(fingerprint=self._fingerprint, tenant=self._tenant, adapter=block.adapter)
        header = content.header
        name = block_hash(parent=parent, token_ids=header.token_ids, extra=header.extra)
        self._known[block.hash] = name
        clear = dataclasses.replace(header, hash=name, parent=parent, fingerprint=self._fingerprint)
        return HostBlock(clear, content.regions)


class _Adoption:
    """An archive that is being imported."""

    def __init__(
        self,
        transfer: CacheTransfer,
        model: _Model,
        terms: ImportTerms,
        tenant: Tenant,
        commands: EngineCache,
    ) -> None:
        self._transfer = transfer
        self._commands = commands
        self._model = model
        self._terms = terms
        self._tenant = tenant
        self._reader = ArchiveReader(block_limit_bytes=max(1, terms.block_limit_bytes))
        self._roots = {
            root_hash(fingerprint=model.fingerprint, tenant=tenant, adapter=adapter): adapter
            for adapter in (None, *model.adapters)
        }
        """Adapter (None for the bare model) by its root for this tenant."""
        self._here: dict[BlockHash, tuple[BlockHash, AdapterDigest | None]] = {}
        """Name on this server and adapter, by the name in the archive."""
        self._entry: BlockEntry | None = None
        """The block whose bytes come next; None if they are skipped."""
        self._data = bytearray()
        self._refused: Counter[AdoptionRefusal] = Counter()
        self._adopted_count = self._adopted_bytes = self._known_count = 0

    def feed(self, chunk: bytes) -> tuple[list[Item], str]:
        """Return the items now complete, and why reading stopped, or "". Any thread, one at a time."""
        items: list[Item] = []
        try:
            for item in self._reader.feed(chunk):
                items.append(item)
        except ArchiveError as error:
            return items, str(error)
        return items, ""

    def end_detail(self) -> str:
        """Return what is missing at the end of the stream, or ""."""
        try:
            self._reader.finish()
        except ArchiveError as error:
            return str(error)
        return ""

    async def take(self, item: Item) -> None:
        """Process an item from the reader. Raises NotFound if the archive is of another model."""
        if isinstance(item, ArchiveHeader):
            self._check_model(item)
        elif isinstance(item, BlockEntry):
            refusal = self._refusal_of(item)
            self._entry = None if refusal else item
            self._refused.update([refusal] if refusal else [])
        elif isinstance(item, bytes) and self._entry is not None:
            self._data += item
        elif isinstance(item, BlockEnd) and self._entry is not None:
            entry, data = self._entry, self._data
            self._entry, self._data = None, bytearray()
            await self._adopt(entry, data)

    def response(self, stop_detail: str) -> messages.ImportResponse:
        """Return what happened to the blocks."""
        counts = [
            messages.ImportRefusalCount(reason=enum_proto(refusal, messages.ImportRefusal), block_count=count)
            for refusal, count in self._refused.items()
        ]
        return messages.ImportResponse(
            adopted_block_count=self._adopted_count,
            adopted_bytes=self._adopted_bytes,
            known_block_count=self._known_count,
            refusals=counts,
            stop_detail=stop_detail,
        )

    def _check_model(self, header: ArchiveHeader) -> None:
        theirs, own = header.fingerprint.hex(), self._model.fingerprint.hex()
        if theirs != own or header.block_token_limit != self._terms.block_token_limit:
            raise NotFound(
                Reason.MODEL_NOT_FOUND,
                f"the archive has blocks of {header.block_token_limit} tokens of model {theirs}, this server "
                f"serves {own} with blocks of {self._terms.block_token_limit}; import it where that model is "
                "served",
                metadata={"archive": theirs, "served": own},
            )

    def _refusal_of(self, entry: BlockEntry) -> AdoptionRefusal | None:
        if entry.start_token_index:
            return None if entry.parent in self._here else AdoptionRefusal.PARENT_MISSING
        has_root = entry.adapter is not None or entry.parent in self._roots
        return None if has_root else AdoptionRefusal.SCOPE

    async def _adopt(self, entry: BlockEntry, data: bytearray) -> None:
        try:
            file = memoryview(data).toreadonly()
            block = await self._transfer.prompts.run(partial(self._model.files.decode, file))
            command = self._command(entry, block, len(data))
        except ValueError:  # not a block, or one that cannot be verified
            command = None
        if command is None:
            self._refused[AdoptionRefusal.DAMAGED] += 1
            return
        # Wait while other models' blocks fill the write queue, but not forever for a disk that hangs.
        answer = await self._transfer.patiently(
            self._commands, command, BlockAdoption, try_count=_ADOPT_TRY_COUNT
        )
        if answer.refusal is not None:
            self._refused[answer.refusal] += 1
            return
        self._here[entry.hash] = answer.hash, command.adapter
        self._known_count += not answer.is_new
        self._adopted_count += answer.is_new
        self._adopted_bytes += len(data) if answer.is_new else 0

    def _command(self, entry: BlockEntry, block: HostBlock, size_bytes: int) -> AdoptBlock | None:
        """Return the command to adopt a verified block; None if it is not the block that its entry names.

        Raises ValueError for keys that cannot be joined.
        """
        header, limit = block.header, self._terms.block_token_limit
        if _entry(header, size_bytes, None) != dataclasses.replace(entry, adapter=b""):
            return None
        if (header.fingerprint, header.block_token_limit) != (self._model.fingerprint, limit):
            return None
        parent: BlockHash | None = None
        if entry.start_token_index:
            parent, adapter = self._here[entry.parent]
        elif entry.adapter is not None:
            adapter = AdapterDigest(entry.adapter) if entry.adapter else None
        else:
            adapter = self._roots[entry.parent]  # a block without a root is refused before its bytes
        keys = join_keys(header.token_ids, header.extra)
        return AdoptBlock(self._tenant, adapter, parent, entry.start_token_index, keys, block.regions)


def _entry(header: BlockHeader, size_bytes: int, adapter: AdapterDigest | None) -> BlockEntry:
    return BlockEntry(
        header.hash, header.parent, header.start_token_index, header.token_count, size_bytes, adapter or b""
    )


def _chunks(parts: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield the bytes of all parts in messages of at most `CHUNK_BYTES`, and not needlessly short."""
    pending = bytearray()
    for part in parts:
        for begin in range(0, part.nbytes, CHUNK_BYTES):
            piece = part[begin : begin + CHUNK_BYTES]
            if len(pending) + piece.nbytes > CHUNK_BYTES:
                yield bytes(pending)
                pending.clear()
            pending += piece
    if pending:
        yield bytes(pending)
