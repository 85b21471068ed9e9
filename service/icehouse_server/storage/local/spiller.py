"""Spiller: the queue of blocks to write, and the commit of the first. Each accepted block gets one outcome.

While the disk makes the first block's file durable, the second block's file is written: hashing and writing
a block take about as long as waiting for it.
"""

from __future__ import annotations

import collections
import dataclasses
import sqlite3
from collections.abc import Callable, Collection
from itertools import islice

from icehouse_server.averages import MovingAverage
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.pins import NOT_PINNED, pin_end_time
from icehouse_server.storage.api import OVERHEAD_BYTES, BlockPersisted, StorageFailure, Ticket
from icehouse_server.storage.disk_error import DiskErrorKind, classify, outline
from icehouse_server.storage.local.block_format.block_file import PreparedBlock, prepare_block
from icehouse_server.storage.local.directory.manifest import GROWTH_ALLOWANCE_BYTES
from icehouse_server.storage.local.directory.space import SpaceReclaim
from icehouse_server.storage.local.directory.store import BlockStore, Writing
from icehouse_server.storage.local.open_model import OpenModel
from icehouse_server.storage.local.storage_state import StorageState, StoreStatus


@dataclasses.dataclass(eq=False, slots=True)
class BlockSpill:
    """A block to persist. Its outcome frees its bytes in the queue."""

    model: OpenModel
    ticket: Ticket[BlockPersisted]
    block: HostBlock
    request_id: RequestId | None
    """The request that made the block leave RAM."""
    pin_end_time: float
    """The block is inserted with this pin, so that it cannot be evicted before it is pinned."""


class Spiller:
    """A queue of all models' blocks to commit, bounded by the bytes that were reserved for them."""

    def __init__(
        self,
        store: BlockStore,
        state: StorageState,
        *,
        finish: Callable[[OpenModel, Ticket[BlockPersisted], BlockPersisted | StorageFailure], None],
    ) -> None:
        self._store = store
        self._state = state
        self._clock = store.clock
        self._finish_ticket = finish
        self._rate = MovingAverage()
        self._spills: collections.deque[BlockSpill] = collections.deque()
        self._prepared: PreparedBlock | None = None
        self._writings: collections.deque[Writing] = collections.deque()
        """The files of the first and perhaps the second spill in the queue."""
        self._finished_time = 0.0
        self._has_retried = False

    def __len__(self) -> int:
        return len(self._spills)

    def add(self, request: BlockSpill) -> None:
        request.model.counts.spill.accepted_block_total += 1
        self._spills.append(request)

    def refuse(self, request: BlockSpill) -> None:
        """Drop a block for which nothing could be reserved."""
        model, cause = request.model, SpillDropCause.NO_CREDIT
        model.counts.spill.accepted_block_total += 1
        model.counts.drops[cause] += 1
        self._finish_ticket(model, request.ticket, StorageFailure(cause, hash=request.block.header.hash))

    def pin(self, hashes: Collection[BlockHash], end_time: float) -> set[BlockHash]:
        """Pin or unpin the queued ones among these blocks, and return their names."""
        queued = [spill for spill in self._spills if spill.block.header.hash in hashes]
        for spill in queued:
            spill.pin_end_time = pin_end_time(spill.pin_end_time, end_time)
        return {spill.block.header.hash for spill in queued}

    def step(self) -> None:
        """Do the next step for the first spill: evict a batch for it, write it, commit it or drop it.

        Raises `OSError` or `sqlite3.Error` if the disk is broken and not just full.
        """
        if self._writings:
            self._write_ahead()
            self._commit_first()
            return
        spill = self._spills[0]
        if self._store.index.covers(spill.block):
            self._finish_stored(spill)
        elif not self._state.takes_blocks:
            self._drop(spill, SpillDropCause.WRITES_OFF)
        else:
            self._prepared = self._prepared or self._prepare(spill.block)
            self._write(spill, self._prepared)

    def undo_writings(self) -> None:
        """Remove the files that are being written; their spills stay queued."""
        while self._writings:
            self._store.undo(self._writings.pop())

    def drop_all(self, cause: SpillDropCause) -> None:
        """Commit the files being written, and drop everything else in the queue. Raises like `step`."""
        while self._writings:
            self._commit_first()
        while self._spills:
            self._drop(self._spills[0], cause)

    def drop_of(self, model: OpenModel, cause: SpillDropCause) -> None:
        """Commit one model's files being written, and drop everything else of it. Raises like `step`."""
        while any(spill.model is model for spill in islice(self._spills, len(self._writings))):
            self._commit_first()
        while (spill := next((each for each in self._spills if each.model is model), None)) is not None:
            self._drop(spill, cause)

    def _finish_stored(self, spill: BlockSpill) -> None:
        """Finish the first spill, which is stored already; pin the block if requested."""
        name = spill.block.header.hash
        if spill.pin_end_time != NOT_PINNED:
            try:
                self._store.pin([name], spill.pin_end_time)
            except sqlite3.Error as error:
                self._refused(spill, error, GROWTH_ALLOWANCE_BYTES)
                return
        stored = self._store.index.get(name)
        assert stored is not None, name.hex()
        spill.model.counts.drops[SpillDropCause.DUPLICATE] += 1
        self._finish(spill, BlockPersisted(stored))

    def _prepare(self, block: HostBlock) -> PreparedBlock:
        return prepare_block(block, cipher=self._store.cipher, has_planes=self._state.codec.has_planes)

    def _write(self, spill: BlockSpill, prepared: PreparedBlock) -> None:
        size_bytes = prepared.file_bytes
        if not self._store.space.can_ever_fit(size_bytes):
            self._drop(spill, SpillDropCause.DISK_FULL)
            return
        if not self._store.space.budget_allows(size_bytes, now_time=self._clock.wall()):
            self._drop(spill, SpillDropCause.DAILY_BUDGET)
            return
        try:
            reclaimed = self._store.make_space(size_bytes)
            if reclaimed is SpaceReclaim.READY:
                self._writings.append(self._store.begin(prepared))
        except (OSError, sqlite3.Error) as error:
            # If rows could not be deleted, no block was evicted.
            self._refused(spill, error, size_bytes)
            return
        if reclaimed is SpaceReclaim.FULL:
            self._drop(spill, SpillDropCause.DISK_FULL)

    def _write_ahead(self) -> None:
        """Write the second spill's file if nothing prevents it; obstacles are handled when its turn comes."""
        if len(self._spills) < 2:
            return
        block = self._spills[1].block
        if self._store.index.covers(block) or block.header.hash == self._spills[0].block.header.hash:
            return
        prepared = self._prepare(block)
        is_allowed = self._store.space.budget_allows(prepared.file_bytes, now_time=self._clock.wall())
        # The first block's row is not inserted yet, and may make the manifest grow.
        if not (is_allowed and self._store.has_space(prepared.file_bytes + GROWTH_ALLOWANCE_BYTES)):
            return
        try:
            self._writings.append(self._store.begin(prepared))
        except OSError as error:
            if classify(error) is not DiskErrorKind.FULL:
                raise

    def _commit_first(self) -> None:
        spill, writing = self._spills[0], self._writings.popleft()
        size_bytes = writing.file.file_bytes
        try:
            record = self._store.finish(writing, pin_end_time=spill.pin_end_time)
        except (OSError, sqlite3.Error) as error:
            self.undo_writings()
            self._refused(spill, error, size_bytes)
            return
        now = self._clock.monotonic()
        self._state.note_write()
        # The next block was written meanwhile: the time that both took together is counted once.
        own_s = now - max(writing.began, self._finished_time)
        self._finished_time = now
        self._state.write_bytes_per_s = self._rate.add_rate(size_bytes, elapsed_s=own_s)
        counts = spill.model.counts.spill
        counts.persisted_block_total += 1
        counts.persisted_byte_total += record.file_bytes
        self._finish(spill, BlockPersisted(record, spill.request_id, writing.start_time, now - writing.began))

    def _refused(self, spill: BlockSpill, error: OSError | sqlite3.Error, size_bytes: int) -> None:
        """Free space on a full disk; on a broken disk, drop the first spill and raise."""
        if not self._is_full(error):
            self._drop(spill, SpillDropCause.WRITE_FAILED)
            raise error
        # The disk is full before our limits were reached: evict and retry once, then stop writing.
        if not self._has_retried:
            self._has_retried = True
            try:
                self._store.reclaim(size_bytes)
                return
            except sqlite3.Error as again:
                if not self._is_full(again):
                    raise
        self._state.fail(
            StoreStatus.FULL,
            f"Disk is full: {outline(error)} after evicting; writes resume when {size_bytes} bytes are free "
            f"above the floor of {self._store.settings.free_floor_bytes}",
            now=self._clock.monotonic(),
            needed_bytes=size_bytes,
        )
        self._drop(spill, SpillDropCause.DISK_FULL)

    def _is_full(self, error: OSError | sqlite3.Error) -> bool:
        """Return whether there is no space. SQLite reports an exhausted quota as an I/O error."""
        kind = classify(error)
        if kind is DiskErrorKind.REFUSED and isinstance(error, sqlite3.Error):
            return self._store.ballast.is_disk_full()
        return kind is DiskErrorKind.FULL

    def _drop(self, spill: BlockSpill, cause: SpillDropCause) -> None:
        spill.model.counts.drops[cause] += 1
        self._finish(spill, StorageFailure(cause, self._state.detail, spill.block.header.hash))

    def _finish(self, spill: BlockSpill, outcome: BlockPersisted | StorageFailure) -> None:
        model, ticket, size_bytes = spill.model, spill.ticket, spill.block.size_bytes + OVERHEAD_BYTES
        if spill is self._spills[0]:
            self._prepared = None
            self._has_retried = False
        self._spills.remove(spill)
        model.spill_queue.release(size_bytes)
        self._state.spill_queue.release(size_bytes)
        self._finish_ticket(model, ticket, outcome)
