"""Storage: the SSD tier as the engine sees it, calls that never block, answers posted to its mailbox.

The engine's thread calls the methods; `post` is called on the storage and reader threads and
must not block. Every queue is bounded: spills by bytes (credit before the copy), loads and
tasks by count; a call that finds its queue full says so and leaves nothing behind.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.errors import StartError
from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.files import Files
from icehouse_server.storage.loads import HeadRequest, LoadId, LoadRequest
from icehouse_server.storage.messages import Outcome, StorageFailed, TaskId
from icehouse_server.storage.settings import STALL_LIMIT_S, StorageSettings
from icehouse_server.storage.worker.credit import Credit, Meter
from icehouse_server.storage.worker.loop import StorageLoop
from icehouse_server.storage.worker.reader_pool import ReaderPool
from icehouse_server.storage.worker.requests import (
    CloseRequest,
    ListRequest,
    PinRequest,
    PurgeRequest,
    Request,
    SpillRequest,
    StatsRequest,
    TouchRequest,
    VerifyRequest,
)

if TYPE_CHECKING:
    # Of an optional extra: loaded only where a key is configured.
    from icehouse_server.storage.encryption.aes_gcm import Cipher

_log = logging.getLogger(__name__)

_Task = TouchRequest | PinRequest | PurgeRequest | VerifyRequest | ListRequest | StatsRequest
_TICK_S = 1.0
"""Longest wait for a message, so that recency is written and a broken disk is tried again."""
_LOCK_TIMEOUT_S = 5.0
_READERS_END_S = 1.0
_LOOK_S = 0.1


class Storage:
    """Owns the storage thread, the readers and their queues.

    The first outcome after `start` is `Inventory`, the last one `StorageClosed` (after `close`) or
    `StorageFailed`. Without threads, `lock`, `open` and `step` do the same work on the caller's.

    A disk may hang for ever, and nothing can end a thread that waits for it: `silence_s`, `hung_read_count`
    and `stall_s` say so, `abandon` gives up on a read, and nobody here waits without a bound.
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
        self._task_ids = count(1)
        self._spill_meter = Meter(settings.spill_queue_limit_bytes)
        self._load_meter = Meter(settings.load_queue_limit_count)
        self._task_meter = Meter(settings.task_queue_limit_count)
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._store = BlockStore(settings, files=files, clock=clock, cipher=cipher)
        self._readers = ReaderPool(
            settings, files=files, clock=clock, post=post, report=self._inbox.put, cipher=cipher
        )
        self._loop = StorageLoop(
            self._store,
            inbox=self._inbox,
            spill_meter=self._spill_meter,
            load_meter=self._load_meter,
            task_meter=self._task_meter,
            clock=clock,
            post=post,
        )

    def lock(self) -> None:
        """Make the directory this process's own; on the calling thread, without `start`.

        Raises `StartError` naming the owner when it has one already. A disk that refuses for
        another reason does not stop the start: the tier begins with writes off and tries again.
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
        """Wait for the threads to end after `close`; False when the storage thread hangs, or runs on for so
        long. What readers are still at nobody waits for: they end with the process."""
        end_time = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            while thread.is_alive() and self._clock.monotonic() < end_time:
                if self.stall_s >= STALL_LIMIT_S:
                    return False
                thread.join(_LOOK_S)
            # The storage thread is the first.
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

    def try_reserve(self, size_bytes: int) -> Credit | None:
        """Take room for one block in the spill queue, before it is copied; None when there is none."""
        return Credit(self._spill_meter, size_bytes) if self._spill_meter.try_take(size_bytes) else None

    def spill(
        self, block: HostBlock, credit: Credit, *, pinned: bool = False, request_id: RequestId | None = None
    ) -> None:
        """Hand a block over to be persisted, pinned or not; `Persisted` or `SpillDropped` follows.

        `request_id` names the request whose work made the block leave RAM.
        """
        assert block.size_bytes <= credit.size_bytes, "Spill larger than its credit"
        self._inbox.put(SpillRequest(block, credit, request_id, pinned))

    def load(self, request: LoadRequest) -> bool:
        """Have blocks read; `Loaded` or `LoadFailed` follows. False when too many loads wait."""
        if not self._load_meter.try_take(1):
            return False
        self._readers.submit(request)
        return True

    def leave_cores(self, *, to_decode: bool) -> None:
        """Let loads take a small share of a core from now on, or all of it; those under way too."""
        self._readers.leave_cores(to_decode=to_decode)

    def read_heads(self, request: HeadRequest) -> bool:
        """Have headers read; `HeadsRead` follows. False when too many loads wait."""
        if not self._load_meter.try_take(1):
            return False
        self._readers.submit_heads(request)
        return True

    def silence_s(self, load_id: LoadId) -> float:
        """Return for how long no reader has come on with a load or a question for headers; 0 once it was
        answered."""
        return self._readers.silence_s(load_id)

    def abandon(self, load_id: LoadId) -> None:
        """Stop waiting for a load or for headers. An answer may follow all the same."""
        self._readers.abandon(load_id)

    @property
    def hung_read_count(self) -> int:
        """Reads that were abandoned and that the disk has not come back from."""
        return self._readers.hung_count

    @property
    def stall_s(self) -> float:
        """For how long the storage thread has been at one piece of work; 0 while it waits for some."""
        return self._loop.silence_s

    def touch(self, hashes: Iterable[BlockHash]) -> bool:
        """Note that blocks were used; a chain from its tail to its head. False when too much waits."""
        return self._send(TouchRequest(tuple(hashes)))

    def pin(self, hashes: Iterable[BlockHash], *, pinned: bool = True) -> TaskId | None:
        """Protect blocks and their ancestors from eviction, those that are yet to be written from their
        first moment there, or stop to; `PinsChanged` or `TaskGivenUp` follows. None when too much waits."""
        task_id = self._next_task_id()
        return task_id if self._send(PinRequest(task_id, tuple(hashes), pinned=pinned)) else None

    def evict(self, hashes: Sequence[BlockHash]) -> TaskId | None:
        """Remove blocks by order; `Evicted`, then `Purged` follow. None when too much waits."""
        task_id = self._next_task_id()
        return task_id if self._send(PurgeRequest(task_id, tuple(hashes))) else None

    def verify(self, hashes: Sequence[BlockHash] | None = None) -> TaskId | None:
        """Read and hash blocks (None: all); `Verified` follows. None when too much waits."""
        task_id = self._next_task_id()
        wanted = None if hashes is None else tuple(hashes)
        return task_id if self._send(VerifyRequest(task_id, wanted)) else None

    def list_stored(self, *, block_limit: int) -> TaskId | None:
        """Name stored blocks, least recently verified first; `Listed` follows. None when too much waits."""
        task_id = self._next_task_id()
        return task_id if self._send(ListRequest(task_id, block_limit)) else None

    def request_stats(self) -> TaskId | None:
        """Ask for the counters; `StatsAnswer` follows. None when too much waits."""
        task_id = self._next_task_id()
        return task_id if self._send(StatsRequest(task_id)) else None

    def close(self, *, deadline_time: float) -> None:
        """Finish spills until the deadline (`Clock.monotonic`), close the directory and end the threads."""
        self._readers.stop()
        self._inbox.put(CloseRequest(deadline_time))

    def _send(self, request: _Task) -> bool:
        if not self._task_meter.try_take(1):
            return False
        self._inbox.put(request)
        return True

    def _next_task_id(self) -> TaskId:
        return TaskId(next(self._task_ids))

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
        """Lock the directory and say so, or why not; to the log when the start did not wait so long."""
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
        """A thread's top: what escapes its loop is told once, and the other threads end too."""
        try:
            body()
        except Exception as error:
            _log.exception("storage_failed")
            if not self._has_failed:
                self._has_failed = True
                self._post(StorageFailed(f"{type(error).__name__}: {error}"))
            self._readers.stop()
