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
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import HostBlock
from icehouse_server.domain.ids import BlockHash, RequestId
from icehouse_server.storage.directory.store import BlockStore
from icehouse_server.storage.files import Files
from icehouse_server.storage.loads import HeadRequest, LoadRequest
from icehouse_server.storage.messages import Outcome, StorageFailed, TaskId
from icehouse_server.storage.settings import StorageSettings
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


class Storage:
    """Owns the storage thread, the readers and their queues.

    `lock`, then `start`; the first outcome is `Inventory`, the last one `StorageClosed` (after
    `close`) or `StorageFailed`. Without threads, `open` and `step` do the same work on the caller's.
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
        """Make the directory this process's own.

        Raises `StartError` naming the owner when it has one already. A disk that refuses for
        another reason does not stop the start: the tier begins with writes off and tries again.
        """
        try:
            self._store.lock()
        except OSError as error:
            _log.error("cache_lock_refused", extra={"detail": str(error)})

    def start(self) -> None:
        """Start the storage thread and the readers."""
        # Its thread starts with the first spill.
        self._store.syncs = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage-sync")
        bodies = [("storage", self._run_loop)]
        bodies += [(f"storage-reader-{n}", self._readers.run) for n in range(self._reader_thread_count)]
        for name, body in bodies:
            thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the threads to end after `close`, together for so long; False when one still runs."""
        end_time = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_time - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

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

    def _run_loop(self) -> None:
        try:
            self._loop.open()
            while not self._loop.is_closed:
                if not self._loop.step() and not self._loop.is_closed:
                    self._loop.wait(_TICK_S)
        finally:
            if self._store.syncs is not None:
                self._store.syncs.shutdown(wait=False)

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
