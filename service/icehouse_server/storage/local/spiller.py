"""Spiller: the spills that wait, and the commit of the first. Every accepted one gets one outcome.

While the disk makes the first one's file durable, the second one's is written: hashing and writing a
block take about as long as waiting for it.
"""

from __future__ import annotations

import collections
import dataclasses
import sqlite3
from collections.abc import Callable, Collection

from icehouse_server.averages import MovingAverage
from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.cache_stats import SpillDropCause
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.storage.api import OVERHEAD_BYTES, Failure, Persisted, Ticket
from icehouse_server.storage.disk_error import DiskErrorKind, classify, outline
from icehouse_server.storage.local.block_format.block_file import PreparedBlock, prepare_block
from icehouse_server.storage.local.credit import Meter
from icehouse_server.storage.local.directory.commit import Writing
from icehouse_server.storage.local.directory.manifest import GROWTH_ALLOWANCE_BYTES
from icehouse_server.storage.local.directory.space import Reclaim
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.stats import StorageCounters
from icehouse_server.storage.local.store_state import StoreState


@dataclasses.dataclass(frozen=True, slots=True)
class Spill:
    """A block to persist, whose room in the queue comes back with the outcome."""

    ticket: Ticket[Persisted]
    block: HostBlock
    request_id: RequestId | None
    """Whose work made the block leave RAM."""
    pinned: bool
    """Whether its row says from the first that it is kept from eviction."""


class Spiller:
    """A queue of blocks to commit, bounded by the room that was taken for them."""

    def __init__(
        self,
        store: BlockStore,
        *,
        state: StoreState,
        counters: StorageCounters,
        meter: Meter,
        clock: Clock,
        finish: Callable[[Ticket[Persisted], Persisted | Failure], None],
    ) -> None:
        self._store = store
        self._state = state
        self._counters = counters
        self._clock = clock
        self._meter = meter
        self._tell = finish
        self._rate = MovingAverage()
        self._spills: collections.deque[Spill] = collections.deque()
        self._prepared: PreparedBlock | None = None
        self._writings: collections.deque[Writing] = collections.deque()
        """The files of the first and perhaps the second spill that waits."""
        self._finished_time = 0.0
        self._has_retried = False

    def __len__(self) -> int:
        return len(self._spills)

    @property
    def accepted_total(self) -> int:
        """Blocks accepted since start."""
        return self._counters.spill.accepted_block_total

    @property
    def settled_total(self) -> int:
        """Blocks of these that have their outcome; the first accepted are the first settled."""
        return self._counters.spill.persisted_block_total + self._counters.drops.total()

    def add(self, request: Spill) -> None:
        """Accept a block."""
        self._counters.spill.accepted_block_total += 1
        self._spills.append(request)

    def set_pinned(self, hashes: Collection[BlockHash], *, pinned: bool) -> set[BlockHash]:
        """Pin or unpin those of these blocks that wait, and return their names: no other spill may evict one
        before its pin."""
        found = set()
        for place, spill in enumerate(self._spills):
            name = spill.block.header.hash
            if name in hashes:
                self._spills[place] = dataclasses.replace(spill, pinned=pinned)
                found.add(name)
        return found

    def step(self) -> None:
        """Bring the first spill nearer to its outcome: evict a batch for it, write it, commit it or drop it.

        Raises `OSError` or `sqlite3.Error` when the disk is broken and not merely full.
        """
        if self._writings:
            self._write_ahead()
            self._finish_writing()
        else:
            self._begin_writing()

    def undo_writings(self) -> None:
        """Remove the files that are being written; their spills wait on."""
        while self._writings:
            self._store.undo(self._writings.pop())

    def drop_all(self, cause: SpillDropCause) -> None:
        """Drop everything that waits and is not written. Raises as `step` does."""
        self._commit_written()
        while self._spills:
            self._drop(cause)

    def _begin_writing(self) -> None:
        block = self._spills[0].block
        if self._store.index.covers(block):
            self._keep_stored()
        elif not self._state.takes_blocks:
            self._drop(SpillDropCause.WRITES_OFF)
        else:
            self._prepared = self._prepared or prepare_block(block, cipher=self._store.cipher)
            self._write(self._prepared)

    def _keep_stored(self) -> None:
        """All of the first one is stored: pin it if it is to be."""
        name = self._spills[0].block.header.hash
        try:
            if self._spills[0].pinned:
                self._store.set_pinned([name], pinned=True)
        except sqlite3.Error as error:
            self._refused(error, GROWTH_ALLOWANCE_BYTES)
            return
        stored = self._store.index.get(name)
        assert stored is not None, name.hex()
        self._counters.drops[SpillDropCause.DUPLICATE] += 1
        self._finish(Persisted(stored))

    def _write(self, prepared: PreparedBlock) -> None:
        size_bytes = prepared.file_bytes
        if not self._store.space.can_ever_fit(size_bytes):
            self._drop(SpillDropCause.DISK_FULL)
            return
        if not self._store.space.budget_allows(size_bytes, now_time=self._clock.wall()):
            self._drop(SpillDropCause.DAILY_BUDGET)
            return
        try:
            room = self._store.make_room(size_bytes)
        except sqlite3.Error as error:
            # Nothing was deleted: there is no space for the manifest to say so.
            self._refused(error, size_bytes)
            return
        if room is Reclaim.PROGRESS:
            return
        if room is Reclaim.FULL:
            self._drop(SpillDropCause.DISK_FULL)
            return
        try:
            self._writings.append(self._store.begin(prepared))
        except OSError as error:
            self._refused(error, size_bytes)

    def _write_ahead(self) -> None:
        """Write the second spill's file where nothing stands in its way; what does is met in its turn."""
        if len(self._spills) < 2:
            return
        block = self._spills[1].block
        if self._store.index.covers(block) or block.header.hash == self._spills[0].block.header.hash:
            return
        prepared = prepare_block(block, cipher=self._store.cipher)
        space = self._store.space
        is_allowed = space.budget_allows(prepared.file_bytes, now_time=self._clock.wall())
        # The first one's row is yet to come, and the manifest may grow by it.
        if not (is_allowed and self._store.has_room(prepared.file_bytes + GROWTH_ALLOWANCE_BYTES)):
            return
        try:
            self._writings.append(self._store.begin(prepared))
        except OSError as error:
            if classify(error) is not DiskErrorKind.FULL:
                raise

    def _commit_written(self) -> None:
        while self._writings:
            self._finish_writing()

    def _finish_writing(self) -> None:
        writing = self._writings.popleft()
        size_bytes = writing.prepared.file_bytes
        try:
            record = self._store.finish(writing, pinned=self._spills[0].pinned)
        except (OSError, sqlite3.Error) as error:
            self.undo_writings()
            self._refused(error, size_bytes)
            return
        now = self._clock.monotonic()
        self._state.wrote()
        elapsed_s = now - writing.began
        # The next one was written meanwhile: what both took together is shared among them.
        own_s = now - max(writing.began, self._finished_time)
        self._finished_time = now
        spill = self._counters.spill
        spill.write_bytes_per_s = self._rate.add_rate(size_bytes, elapsed_s=own_s)
        spill.persisted_block_total += 1
        spill.persisted_byte_total += record.file_bytes
        self._finish(Persisted(record, self._spills[0].request_id, writing.start_time, elapsed_s))

    def _refused(self, error: OSError | sqlite3.Error, size_bytes: int) -> None:
        """Make room on a disk that is full; drop the first spill and raise when it is broken."""
        if self._is_full(error):
            self._make_more_room(size_bytes, error)
            return
        self._drop(SpillDropCause.WRITE_FAILED)
        raise error

    def _is_full(self, error: OSError | sqlite3.Error) -> bool:
        """Say whether there is no space. SQLite calls a quota that is used up an input or output error."""
        kind = classify(error)
        if kind is DiskErrorKind.REFUSED and isinstance(error, sqlite3.Error):
            return self._store.is_out_of_space()
        return kind is DiskErrorKind.FULL

    def _make_more_room(self, size_bytes: int, error: OSError | sqlite3.Error) -> None:
        """The disk is full before the limits said so: evict and retry once, then stop writing."""
        if not self._has_retried:
            self._has_retried = True
            try:
                self._store.reclaim(size_bytes)
                return
            except sqlite3.Error as again:
                if not self._is_full(again):
                    raise
        self._state.fill(
            f"Disk is full: {outline(error)} after evicting; writes resume when {size_bytes} bytes are free "
            f"above the floor of {self._store.space.floor_bytes}",
            now=self._clock.monotonic(),
            needed_bytes=size_bytes,
        )
        self._drop(SpillDropCause.DISK_FULL)

    def _drop(self, cause: SpillDropCause) -> None:
        self._counters.drops[cause] += 1
        self._finish(Failure(cause, self._state.detail, self._spills[0].block.header.hash))

    def _finish(self, outcome: Persisted | Failure) -> None:
        ticket, size_bytes = self._spills[0].ticket, self._spills[0].block.size_bytes
        # The block's buffers are freed here, on the storage thread, before its room is given back.
        self._spills.popleft()
        self._prepared = None
        self._has_retried = False
        self._meter.give_back(size_bytes + OVERHEAD_BYTES)
        self._tell(ticket, outcome)
