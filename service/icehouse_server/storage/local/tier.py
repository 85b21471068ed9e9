"""Local tier: the cold tier of one model on a disk of this machine; `ModelTiers` opens it.

The engine's thread calls the methods; outcomes are posted on the storage and reader threads, and posting
must not block. Every queue is bounded: blocks to be written by bytes, reads and orders by count. A call
that finds its queue full returns so and changes nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from icehouse_server.domain.blocks import BlockDamage, BlockHeader, HostBlock
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.pins import NOT_PINNED
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    STALL_LIMIT_S,
    AnyTicket,
    BlockPersisted,
    BlocksLoaded,
    BlocksPurged,
    ChainFound,
    Fetched,
    KvTarget,
    LearnedRates,
    Names,
    PlannedBlock,
    StorageFailure,
    Ticket,
    Verified,
    WriteBudget,
)
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.manifest import BlockRecord
from icehouse_server.storage.local.directory.space import SpaceReclaim
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.open_model import OpenModel
from icehouse_server.storage.local.reader_pool import ReaderPool
from icehouse_server.storage.local.spiller import BlockSpill
from icehouse_server.storage.local.storage_loop import StorageLoop
from icehouse_server.storage.local.storage_state import StorageState, note_damage

_PURGE_BATCH_COUNT = 64
_Noted = TypeVar("_Noted")
_Result = TypeVar("_Result")
_POLL_S = 0.1


class LocalTier:
    """A `ColdTier`: one model's access to the storage thread and the readers, which serve other models too.

    The first outcome after `start` is `Inventory`, the last one `StorageClosed` (after `close`, or when the
    directory is closed) or `StorageFailed`.

    A disk may hang for ever, and nothing can end a thread that waits for it: `silence_s`, `hung_read_count`
    and `stall_s` report that for all models together, `abandon` gives up on a read, and every wait here is
    bounded.
    """

    def __init__(self, loop: StorageLoop, readers: ReaderPool, model: OpenModel) -> None:
        self._loop = loop
        self._readers = readers
        self._model = model
        self._store = loop.store
        self._state = loop.state
        self._clock = loop.store.clock

    def start(self) -> None:
        """Begin; the inventory is posted once the directory is open."""
        self._model.is_started = True
        self._loop.send(partial(self._loop.attach, self._model))
        self._loop.models.end_late(self._model)

    def close(self, *, deadline_time: float) -> None:
        """Finish this model's spills until the deadline (`Clock.monotonic`), then end it; the other models
        continue. After its end, its fingerprint may be opened again."""
        self._readers.leave_cores(self._model, to_decode=False)
        self._loop.send(partial(self._loop.close_model, self._model, deadline_time))
        self._loop.models.end_late(self._model)

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the end after `close`; False when the storage thread hangs or takes longer."""
        end_time = self._clock.monotonic() + timeout_s
        while not self._model.ended.wait(_POLL_S):
            if self.stall_s >= STALL_LIMIT_S or self._clock.monotonic() >= end_time:
                return False
        return True

    @property
    def queue_space_bytes(self) -> int:
        """Space in the queue that all models share. If several models are open, each may use at most as much
        as it leaves free: so none takes more than half, and the next always finds some of the rest."""
        free_bytes = self._state.spill_queue.free
        if len(self._loop.models) > 1:
            free_bytes -= self._model.spill_queue.used
        return max(0, free_bytes)

    @property
    def block_limit_bytes(self) -> int:
        return self._state.spill_queue.limit

    @property
    def write_budget(self) -> WriteBudget | None:
        limit_bytes = self._store.settings.daily_write_limit_bytes
        if not limit_bytes:
            return None
        written_bytes = self._store.space.written_bytes(self._clock.wall())
        return WriteBudget(limit_bytes, max(0, limit_bytes - written_bytes))

    def put(
        self, block: HostBlock, *, pin_end_time: float = NOT_PINNED, request_id: RequestId | None = None
    ) -> Ticket[BlockPersisted]:
        size_bytes = block.size_bytes + OVERHEAD_BYTES
        ticket: Ticket[BlockPersisted] = Ticket()
        spill = BlockSpill(self._model, ticket, block, request_id, pin_end_time)
        # Not limited by its own share, which may have shrunk since the caller asked. If another model filled
        # the queue while this block was being copied, the block is dropped.
        if self._state.spill_queue.try_reserve(size_bytes):
            self._model.spill_queue.try_reserve(size_bytes)
            self._loop.send(partial(self._loop.spiller.add, spill))
        else:
            self._loop.send(partial(self._loop.spiller.refuse, spill))
        return ticket

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvTarget | None) -> Ticket[BlocksLoaded] | None:
        assert blocks, "A load asks for no block"
        if not self._model.read_queue.try_reserve(1):
            return None
        return self._readers.submit(self._model, blocks, into)

    def heads(self, blocks: Names) -> Ticket[tuple[BlockHeader, ...]] | None:
        if not self._model.read_queue.try_reserve(1):
            return None
        return self._readers.submit(self._model, names=blocks)

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[ChainFound] | None:
        """Return None: there is no store to ask."""

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        """Return None: there is no store to ask."""

    def touch(self, blocks: Names) -> bool:
        return self._note(self._loop.touch, blocks)

    def demote(self, blocks: Names) -> bool:
        return self._note(self._loop.demote, blocks)

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        return self._order(lambda ticket: self._loop.pin(self._model, ticket, blocks, end_time))

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[BlocksPurged] | None:
        work = _purge(self._store, blocks)
        return self._order(lambda ticket: self._loop.begin(self._model, ticket, work))

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        """With None, includes blocks of models that are not open: nobody else verifies them."""
        return self._check(_verify(self._loop, self._model, blocks))

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        """Includes blocks of models that are not open."""
        return self._check(_list_all(self._loop, self._model, block_limit))

    def keep_rates(self, rates: LearnedRates) -> bool:
        return self._note(self._loop.keep_rates, rates)

    def stats(self) -> Ticket[CacheStats] | None:
        return self._order(lambda ticket: self._loop.count(self._model, ticket))

    def abandon(self, ticket: AnyTicket) -> None:
        self._readers.abandon(ticket)

    def silence_s(self, ticket: AnyTicket) -> float:
        return self._readers.silence_s(ticket)

    @property
    def hung_read_count(self) -> int:
        return self._readers.hung_count

    @property
    def stall_s(self) -> float:
        return self._loop.silence_s

    def leave_cores(self, *, to_decode: bool) -> None:
        self._readers.leave_cores(self._model, to_decode=to_decode)

    def _note(self, carry_out: Callable[[OpenModel, _Noted], None], noted: _Noted) -> bool:
        """Have the storage thread note something; False when too much is queued."""
        is_reserved = self._model.order_queue.try_reserve(1)
        if is_reserved:
            self._loop.send(partial(carry_out, self._model, noted))
        return is_reserved

    def _order(self, carry_out: Callable[[Ticket[_Result]], None]) -> Ticket[_Result] | None:
        """Have the storage thread do something for a ticket; None if too much is queued."""
        if not self._model.order_queue.try_reserve(1):
            return None
        ticket: Ticket[_Result] = Ticket()
        self._loop.send(partial(carry_out, ticket))
        return ticket

    def _adopt(self, ticket: Ticket[BlockPersisted], file: BlockFile, path: str) -> None:
        """Adopt the durable, verified file of a block, or remove it; any thread. The caller bounds how many
        at once."""
        work = _adopt(self._store, self._state, file, path)
        self._loop.send(partial(self._loop.adopt, self._model, ticket, work, path))

    def _discard(self, ticket: Ticket[Any], block: BlockHash) -> None:
        """Remove an adopted block, pinned or not; any thread."""
        work = _purge(self._store, (block,))
        self._loop.send(partial(self._loop.adopt, self._model, ticket, work, ""))

    def _check(self, work: Generator[None, None, _Result]) -> Ticket[_Result] | None:
        return self._order(lambda ticket: self._loop.begin(self._model, ticket, work, is_check=True))


# Orders that may take long, done piece by piece. Each is a generator that returns its result.


def _purge(store: BlockStore, names: Names) -> Generator[None, None, BlocksPurged]:
    """Remove blocks in batches, pinned ones too: an order outranks a pin."""
    stored = [name for name in names if name in store.index]
    block_count = size_bytes = 0
    for start in range(0, len(stored), _PURGE_BATCH_COUNT):
        if start:
            yield
        # Looked up only now: a block replaced meanwhile is removed too, one that is gone is skipped.
        records = map(store.index.get, stored[start : start + _PURGE_BATCH_COUNT])
        batch = [record for record in records if record is not None]
        store.remove(batch)
        for record in batch:
            store.counts_of(record).tier.purged_block_total += 1
        block_count += len(batch)
        size_bytes += sum(record.file_bytes for record in batch)
    return BlocksPurged(block_count, size_bytes)


def _adopt(
    store: BlockStore, state: StorageState, file: BlockFile, partial: str
) -> Generator[None, None, BlockPersisted | StorageFailure]:
    """Make space for a file and commit it, within the limits for spills. Removes the file if that fails."""
    name, size_bytes = file.outline.hash, file.file_bytes
    stored = store.index.get(name)
    if stored is not None and all(stored.region_bytes(region.kind) for region in file.regions):
        store.extras.remove(partial)
        return BlockPersisted(stored)
    while True:
        cause: SpillDropCause | None = None
        if not state.takes_blocks:
            cause = SpillDropCause.WRITES_OFF
        elif not store.space.budget_allows(size_bytes, now_time=store.clock.wall()):
            cause = SpillDropCause.DAILY_BUDGET
        else:
            reclaimed = store.make_space(size_bytes)
            if reclaimed is SpaceReclaim.READY:
                return BlockPersisted(store.commit(file, partial))
            if reclaimed is SpaceReclaim.FULL or not store.space.can_ever_fit(size_bytes):
                cause = SpillDropCause.DISK_FULL
        if cause is not None:
            store.extras.remove(partial)
            return StorageFailure(cause, hash=name)
        yield


def _own_or_nobodys(loop: StorageLoop, model: OpenModel) -> Iterator[BlockHash]:
    """Yield the blocks of this model, and those of models that are not open."""
    for record in loop.store.index:
        if record.fingerprint == model.fingerprint or record.fingerprint not in loop.models:
            yield record.hash


def _verify(loop: StorageLoop, model: OpenModel, names: Names | None) -> Generator[None, None, Verified]:
    """Read and hash one file at a time and compare it with its row; None means all of them."""
    store, integrity = loop.store, model.counts.integrity
    checked_count = checked_bytes = 0
    damaged: list[StorageFailure] = []
    for number, name in enumerate(list(_own_or_nobodys(loop, model)) if names is None else names):
        if number:
            yield
        record = store.index.get(name)
        if record is None:
            continue  # it was evicted meanwhile
        model.last_verified = name
        failure = _verify_block(store, record)
        if failure is not None and failure.cause is BlockDamage.MEMORY:
            continue  # the file may be sound
        checked_count += 1
        checked_bytes += record.file_bytes
        integrity.verified_block_total += 1
        if failure is not None:
            damaged.append(failure)
            note_damage(integrity, failure)
            store.retire(failure)
    return Verified(checked_count, checked_bytes, tuple(damaged))


def _list_all(loop: StorageLoop, model: OpenModel, block_limit: int) -> Generator[None, None, Names]:
    """Return the stored names in hash order, starting after the last one verified. Done in one piece."""
    yield from ()
    hashes = sorted(_own_or_nobodys(loop, model))
    start = 0 if model.last_verified is None else bisect.bisect_right(hashes, model.last_verified)
    return tuple([*hashes[start:], *hashes[:start]][: block_limit or None])


def _verify_block(store: BlockStore, record: BlockRecord) -> StorageFailure | None:
    path = store.paths.block(record.fingerprint, record.hash)
    try:
        file = verify_block(store.files, path, cipher=store.cipher)
        if not record.is_of(file):
            # If the file was replaced but its row could not be written, the row is written now.
            store.check_rows([record.hash])
            record = store.index.get(record.hash) or record
        store.manifest.check(record, file)
    except BlockFileError as error:
        return StorageFailure(error.damage, str(error), record.hash)
    return None
