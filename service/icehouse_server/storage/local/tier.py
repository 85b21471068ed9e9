"""Local tier: the cold tier on a disk of this machine, with one thread that owns it and some that read.

The engine's thread calls the methods; `post` is called on the storage and reader threads and
must not block. Every queue is bounded: blocks to be written by bytes, reads and orders by count. A call
that finds its queue full returns so and changes nothing.
"""

from __future__ import annotations

import bisect
import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import BlockHeader, Damage, HostBlock
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.ids import RequestId
from icehouse_server.errors import StartError
from icehouse_server.pins import NOT_PINNED
from icehouse_server.storage.api import (
    OVERHEAD_BYTES,
    STALL_LIMIT_S,
    AnyTicket,
    Failure,
    Fetched,
    Found,
    KvTarget,
    Loaded,
    Names,
    Outcome,
    Persisted,
    PlannedBlock,
    Purged,
    StorageFailed,
    Ticket,
    Verified,
    WriteBudget,
)
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.block_format.block_file import verify_block
from icehouse_server.storage.local.block_format.header import BlockFile, BlockFileError
from icehouse_server.storage.local.directory.manifest import BlockRecord
from icehouse_server.storage.local.directory.space import Reclaim
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.local.reader_pool import ReaderPool, ReadReport
from icehouse_server.storage.local.spiller import Spill
from icehouse_server.storage.local.storage_loop import Call, StorageLoop
from icehouse_server.storage.local.storage_state import StorageState, note_damage
from icehouse_server.storage.storage_settings import StorageSettings

_log = logging.getLogger(__name__)

_PURGE_BATCH_COUNT = 64
_Result = TypeVar("_Result")
_TICK_S = 1.0
"""Longest wait for a message, so that recency is written and a broken disk is retried."""
_LOCK_TIMEOUT_S = 5.0
_READERS_END_S = 1.0
_POLL_S = 0.1


class LocalTier:
    """A `ColdTier`: owns the storage thread, the readers and their queues.

    The first outcome after `start` is `Inventory`, the last one `StorageClosed` (after `close`) or
    `StorageFailed`. Without `start`, `lock`, `open` and `step` do the same work on the caller's thread.

    A disk may hang for ever, and nothing can end a thread that waits for it: `silence_s`, `hung_read_count`
    and `stall_s` report that, `abandon` gives up on a read, and every wait here has a bound.
    """

    def __init__(
        self,
        settings: StorageSettings,
        *,
        files: Files,
        clock: Clock,
        post: Callable[[Outcome], object],
        cipher: Cipher | None = None,
    ) -> None:
        """With a `cipher` every block is encrypted on its way to the disk."""
        self._post = post
        self._clock = clock
        self._has_failed = False
        self._threads: list[threading.Thread] = []
        self._reader_thread_count = settings.reader_thread_count
        self._state = StorageState(settings)
        self._inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._store = BlockStore(settings, files=files, clock=clock, cipher=cipher)
        self._loop = StorageLoop(self._store, self._state, inbox=self._inbox, post=post)
        self._readers = ReaderPool(
            settings, files=files, clock=clock, post=post, report=self._count_read, cipher=cipher
        )

    def lock(self) -> None:
        """Make the directory this process's own.

        Raises `StartError` naming the owner when it has one already. A disk that refuses for
        another reason does not stop the start: the tier begins with writes off and retries.
        """
        try:
            self._store.lock()
        except OSError as error:
            _log.error("cache_lock_refused", extra={"detail": str(error)})

    def start(self, *, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        """Start the readers and the storage thread, which locks and opens the directory.

        Raises what `lock` raises. A disk that does not answer in time does not stop the start: the tier
        begins when it does.
        """
        # Its thread starts with the first spill.
        self._store.syncs = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage-sync")
        locked: Future[None] = Future()
        self._start_thread("storage", lambda: self._run_loop(locked))
        for number in range(self._reader_thread_count):
            self._start_thread(f"storage-reader-{number}", self._readers.run)
        try:
            locked.result(lock_timeout_s)
        except TimeoutError:
            locked.cancel()
            _log.error("cache_directory_hangs", extra={"waited_s": lock_timeout_s})
        except StartError:
            self._readers.stop()
            raise

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the threads to end after `close`; False when the storage thread hangs or takes longer.
        Readers that take longer are not waited for: they end with the process."""
        end_time = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            while thread.is_alive() and self._clock.monotonic() < end_time:
                if self.stall_s >= STALL_LIMIT_S:
                    return False
                thread.join(_POLL_S)
            # The first is the storage thread; the others are readers.
            end_time = min(end_time, self._clock.monotonic() + _READERS_END_S)
        return not (self._threads and self._threads[0].is_alive())

    def _start_thread(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def open(self) -> None:
        """Open the directory on the calling thread; only without `start`."""
        self._loop.open()

    def step(self) -> bool:
        """Do one piece of work on the calling thread; False when nothing is left. Only without `start`."""
        has_read = self._readers.step()
        return self._loop.step() or has_read

    @property
    def queue_space_bytes(self) -> int:
        return self._state.spill_queue.free

    @property
    def write_budget(self) -> WriteBudget | None:
        limit_bytes = self._store.settings.daily_write_limit_bytes
        if not limit_bytes:
            return None
        written_bytes = self._store.space.written_bytes(self._clock.wall())
        return WriteBudget(limit_bytes, max(0, limit_bytes - written_bytes))

    def put(
        self, block: HostBlock, *, pin_end_time: float = NOT_PINNED, request_id: RequestId | None = None
    ) -> Ticket[Persisted]:
        is_reserved = self._state.spill_queue.try_reserve(block.size_bytes + OVERHEAD_BYTES)
        assert is_reserved, f"No space for {block.size_bytes} bytes in the write queue"
        ticket: Ticket[Persisted] = Ticket()
        self._inbox.put(partial(self._loop.put, Spill(ticket, block, request_id, pin_end_time)))
        return ticket

    def get_into(self, blocks: Sequence[PlannedBlock], into: KvTarget | None) -> Ticket[Loaded] | None:
        assert blocks, "A load asks for no block"
        return self._readers.submit(blocks, into) if self._state.read_queue.try_reserve(1) else None

    def heads(self, blocks: Names) -> Ticket[tuple[BlockHeader, ...]] | None:
        return self._readers.submit(names=blocks) if self._state.read_queue.try_reserve(1) else None

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[Found] | None:
        """There is nobody to ask."""

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        """There is nobody to ask."""

    def touch(self, blocks: Names) -> bool:
        is_reserved = self._state.order_queue.try_reserve(1)
        if is_reserved:
            self._inbox.put(partial(self._loop.touch, blocks))
        return is_reserved

    def demote(self, blocks: Names) -> bool:
        is_reserved = self._state.order_queue.try_reserve(1)
        if is_reserved:
            self._inbox.put(partial(self._loop.demote, blocks))
        return is_reserved

    def pin(self, blocks: Names, end_time: float) -> Ticket[Names] | None:
        return self._order(lambda ticket: self._loop.pin(ticket, blocks, end_time))

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[Purged] | None:
        return self._order(lambda ticket: self._loop.begin(ticket, _purge(self._store, blocks)))

    def verify(self, blocks: Names | None = None) -> Ticket[Verified] | None:
        return self._check(_verify(self._store, blocks))

    def names(self, *, block_limit: int) -> Ticket[Names] | None:
        return self._check(_list_all(self._store, block_limit))

    def stats(self) -> Ticket[CacheStats] | None:
        return self._order(self._loop.count)

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
        self._readers.leave_cores(to_decode=to_decode)

    def close(self, *, deadline_time: float) -> None:
        """Finish spills until the deadline (`Clock.monotonic`), close the directory and end the threads."""
        self._readers.stop()
        self._inbox.put(partial(self._loop.close, deadline_time))

    def _count_read(self, report: ReadReport) -> None:
        self._inbox.put(partial(self._loop.count_read, report))

    def _order(self, carry_out: Callable[[Ticket[_Result]], None]) -> Ticket[_Result] | None:
        """Have the storage thread do something for a ticket; None when too much is queued."""
        if not self._state.order_queue.try_reserve(1):
            return None
        ticket: Ticket[_Result] = Ticket()
        self._inbox.put(partial(carry_out, ticket))
        return ticket

    def _adopt(self, ticket: Ticket[Persisted], file: BlockFile, path: str) -> None:
        """Take in the durable, verified file of a block, or remove it; any thread. The caller bounds how many
        at once."""
        self._inbox.put(partial(self._loop.adopt, ticket, _adopt(self._store, self._state, file, path)))

    def _check(self, work: Generator[None, None, _Result]) -> Ticket[_Result] | None:
        return self._order(lambda ticket: self._loop.begin(ticket, work, is_check=True))

    def _run_loop(self, locked: Future[None]) -> None:
        try:
            if not self._lock_first(locked):
                return
            self._loop.open()
            while not self._loop.is_closed:
                if not self._loop.step() and not self._loop.is_closed:
                    self._loop.wait(_TICK_S)
        finally:
            if self._store.syncs is not None:
                self._store.syncs.shutdown(wait=False)

    def _lock_first(self, locked: Future[None]) -> bool:
        """Lock the directory and report the result to `start`, or to the log if it stopped waiting."""
        with self._loop.piece():
            try:
                self.lock()
            except StartError as error:
                if locked.set_running_or_notify_cancel():
                    locked.set_exception(error)
                else:
                    _log.error("cache_directory_refused", extra={"detail": error.message})
                self._post(StorageFailed(error.message))
                return False
        if locked.set_running_or_notify_cancel():
            locked.set_result(None)
        return True

    def _run(self, body: Callable[[], None]) -> None:
        """The top of each thread: an exception is reported once, and the other threads end too."""
        try:
            body()
        except Exception as error:
            _log.exception("storage_failed")
            if not self._has_failed:
                self._has_failed = True
                self._post(StorageFailed(f"{type(error).__name__}: {error}"))
            self._readers.stop()


# Orders that may take long, done piece by piece. Each is a generator that returns its result.


def _purge(store: BlockStore, names: Names) -> Generator[None, None, Purged]:
    """Remove blocks in batches, pinned ones too: an order outranks a pin."""
    stored = [name for name in names if name in store.index]
    block_count = size_bytes = 0
    for start in range(0, len(stored), _PURGE_BATCH_COUNT):
        if start:
            yield
        # Looked up now: what was replaced meanwhile is removed too, what is gone is gone.
        records = map(store.index.get, stored[start : start + _PURGE_BATCH_COUNT])
        batch = [record for record in records if record is not None]
        store.remove(batch)
        store.tier.purged_block_total += len(batch)
        block_count += len(batch)
        size_bytes += sum(record.file_bytes for record in batch)
    return Purged(block_count, size_bytes)


def _adopt(
    store: BlockStore, state: StorageState, file: BlockFile, partial: str
) -> Generator[None, None, Persisted | Failure]:
    """Make space for a file and commit it, under the limits of spills. It is gone where this fails."""
    name, size_bytes = file.outline.hash, file.file_bytes
    stored = store.index.get(name)
    if stored is not None and all(stored.region_bytes(region.kind) for region in file.regions):
        store.extras.remove(partial)
        return Persisted(stored)
    while True:
        cause: SpillDropCause | None = None
        if not state.takes_blocks:
            cause = SpillDropCause.WRITES_OFF
        elif not store.space.budget_allows(size_bytes, now_time=store.clock.wall()):
            cause = SpillDropCause.DAILY_BUDGET
        else:
            reclaimed = store.make_space(size_bytes)
            if reclaimed is Reclaim.READY:
                return Persisted(store.commit(file, partial))
            if reclaimed is Reclaim.FULL or not store.space.can_ever_fit(size_bytes):
                cause = SpillDropCause.DISK_FULL
        if cause is not None:
            store.extras.remove(partial)
            return Failure(cause, hash=name)
        yield


def _verify(store: BlockStore, names: Names | None) -> Generator[None, None, Verified]:
    """Read and hash one file at a time and compare it with its row; None: all of them."""
    wanted = [record.hash for record in store.index] if names is None else list(names)
    checked_count = checked_bytes = 0
    damaged: list[Failure] = []
    for number, name in enumerate(wanted):
        if number:
            yield
        record = store.index.get(name)
        if record is None:
            continue  # it was evicted meanwhile
        store.last_verified = name
        failure = _verify_block(store, record)
        if failure is not None and failure.cause is Damage.MEMORY:
            continue  # the file may be whole
        checked_count += 1
        checked_bytes += record.file_bytes
        store.integrity.verified_block_total += 1
        if failure is not None:
            damaged.append(failure)
            note_damage(store.integrity, failure)
            store.retire(failure)
    return Verified(checked_count, checked_bytes, tuple(damaged))


def _list_all(store: BlockStore, block_limit: int) -> Generator[None, None, Names]:
    """Return the stored names in the order of hashes, beginning behind the last one verified. One piece."""
    yield from ()
    hashes = sorted(record.hash for record in store.index)
    start = 0 if store.last_verified is None else bisect.bisect_right(hashes, store.last_verified)
    return tuple([*hashes[start:], *hashes[:start]][: block_limit or None])


def _verify_block(store: BlockStore, record: BlockRecord) -> Failure | None:
    """Return what is wrong with a stored block."""
    path = store.paths.block(record.fingerprint, record.hash)
    try:
        file = verify_block(store.files, path, cipher=store.cipher)
        if not record.is_of(file):
            # If it was replaced and its row could not be written, the row is written now.
            store.check_rows([record.hash])
            record = store.index.get(record.hash) or record
        store.manifest.check(record, file)
    except BlockFileError as error:
        return Failure(error.damage, str(error), record.hash)
    return None
