"""The spills that wait, and the commit of the first of them. Every accepted one gets one outcome."""

from __future__ import annotations

import collections
import sqlite3
from collections.abc import Callable

from service.clock import Clock
from service.domain.cache_stats import SpillDropCause
from service.kv.block_file import PreparedBlock, prepare_block
from service.kv.messages import Flushed, Outcome, Persisted, SpillDropped
from service.kv.reader_pool import Rate
from service.kv.storage_counters import StorageCounters
from service.kv.storage_requests import FlushRequest, SpillRequest
from service.kv.store import BlockStore, Room
from service.kv.write_gate import WriteGate, is_disk_full, outline


class Spiller:
    """A queue of blocks to commit, bounded by the credits that came with them."""

    def __init__(
        self,
        store: BlockStore,
        *,
        gate: WriteGate,
        counters: StorageCounters,
        clock: Clock,
        post: Callable[[Outcome], None],
    ) -> None:
        self._store = store
        self._gate = gate
        self._counters = counters
        self._clock = clock
        self._post = post
        self._rate = Rate()
        self._spills: collections.deque[SpillRequest] = collections.deque()
        self._prepared: PreparedBlock | None = None
        self._has_retried = False
        self._flushes: collections.deque[_Flush] = collections.deque()

    def __len__(self) -> int:
        return len(self._spills)

    def add(self, request: SpillRequest) -> None:
        """Accept a block."""
        self._counters.spill_accepted += 1
        self._spills.append(request)

    def flush(self, request: FlushRequest) -> None:
        """Tell when all spills accepted so far have their outcome, at the latest at the deadline."""
        self._flushes.append(_Flush(request, self._counters))
        self.finish_flushes()

    def step(self) -> None:
        """Bring the first spill nearer to its outcome: evict a batch for it, or commit or drop it.

        Raises `OSError` or `sqlite3.Error` when the disk is broken and not merely full.
        """
        block = self._spills[0].block
        if block.header.hash in self._store.index:
            self._drop(SpillDropCause.DUPLICATE)
        elif not (self._gate.is_open and self._store.is_open):
            self._drop(SpillDropCause.WRITES_OFF)
        else:
            self._prepared = self._prepared or prepare_block(block, vault=self._store.vault)
            self._try_to_commit(self._prepared)
        self.finish_flushes()

    def drop_all(self, cause: SpillDropCause) -> None:
        """Drop everything that waits."""
        while self._spills:
            self._drop(cause)
        self.finish_flushes()

    def finish_flushes(self) -> None:
        """Answer the flushes that are done; at a deadline, drop what waits first."""
        now = self._clock.monotonic()
        if self._spills and any(now >= flush.request.deadline_time for flush in self._flushes):
            while self._spills:
                self._drop(SpillDropCause.SHUTDOWN)
        while self._flushes and self._flushes[0].is_done(self._counters):
            self._post(self._flushes.popleft().answer(self._counters))

    def _try_to_commit(self, prepared: PreparedBlock) -> None:
        size_bytes = prepared.file_bytes
        if not self._store.space.can_ever_fit(size_bytes):
            self._drop(SpillDropCause.DISK_FULL)
            return
        if not self._store.space.budget_allows(size_bytes, now_time=self._clock.wall()):
            self._drop(SpillDropCause.DAILY_BUDGET)
            return
        try:
            room = self._store.make_room(size_bytes)
            if room is Room.PROGRESS:
                return
            if room is Room.FULL:
                self._drop(SpillDropCause.DISK_FULL)
                return
            started, start_time = self._clock.monotonic(), self._clock.wall()
            record = self._store.put(prepared)
        except OSError as error:
            if not is_disk_full(error):
                self._drop(SpillDropCause.WRITE_FAILED)
                raise
            self._make_more_room(size_bytes, error)
            return
        except sqlite3.Error:
            self._drop(SpillDropCause.WRITE_FAILED)
            raise
        self._gate.wrote()
        elapsed_s = self._clock.monotonic() - started
        self._rate.add(size_bytes=size_bytes, elapsed_s=elapsed_s)
        self._counters.write_bytes_per_s = self._rate.bytes_per_s
        self._counters.spill_persisted += 1
        self._finish(Persisted(record, self._spills[0].request_id, start_time, elapsed_s))

    def _make_more_room(self, size_bytes: int, error: OSError) -> None:
        """The disk is full before the limits said so: evict and retry once, then stop writing."""
        if not self._has_retried:
            self._has_retried = True
            self._store.reclaim(size_bytes)
            return
        self._gate.shut(
            f"Disk is full: {outline(error)} after evicting; writes resume when {size_bytes} bytes are free "
            f"above the floor of {self._store.space.floor_bytes}",
            now=self._clock.monotonic(),
            needed_bytes=size_bytes,
        )
        self._drop(SpillDropCause.DISK_FULL)

    def _drop(self, cause: SpillDropCause) -> None:
        self._counters.spill_dropped[cause] += 1
        self._finish(SpillDropped(self._spills[0].block.header.hash, cause))

    def _finish(self, outcome: Outcome) -> None:
        # The block's buffers are freed here, on the storage thread, before its room is given back.
        credit = self._spills.popleft().credit
        self._prepared = None
        self._has_retried = False
        credit.release()
        self._post(outcome)


class _Flush:
    """A flush that waits, with the counters as they were when it came."""

    def __init__(self, request: FlushRequest, counters: StorageCounters) -> None:
        self.request = request
        self._accepted = counters.spill_accepted
        self._persisted = counters.spill_persisted
        self._dropped = counters.spill_dropped.total()

    def is_done(self, counters: StorageCounters) -> bool:
        return counters.spill_persisted + counters.spill_dropped.total() >= self._accepted

    def answer(self, counters: StorageCounters) -> Flushed:
        return Flushed(
            self.request.task_id,
            persisted_count=counters.spill_persisted - self._persisted,
            dropped_count=counters.spill_dropped.total() - self._dropped,
        )
