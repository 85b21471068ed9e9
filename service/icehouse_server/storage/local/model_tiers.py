"""Model tiers: the cold tiers of all models on a disk of this machine.

One directory, one manifest and one budget; one thread that owns them, and several that read. Blocks of all
models age together, also those of models that are not open.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import Fingerprint
from icehouse_server.errors import StartError
from icehouse_server.storage.api import STALL_LIMIT_S, Outcome, StorageFailed
from icehouse_server.storage.files import Files
from icehouse_server.storage.local.directory.store import BlockStore
from icehouse_server.storage.local.encryption.constants import Cipher
from icehouse_server.storage.local.open_model import OpenModel
from icehouse_server.storage.local.reader_pool import ReaderPool, ReadReport
from icehouse_server.storage.local.storage_loop import StorageLoop
from icehouse_server.storage.local.storage_state import StorageState
from icehouse_server.storage.local.tier import LocalTier
from icehouse_server.storage.storage_settings import StorageSettings

_log = logging.getLogger(__name__)

_TICK_S = 1.0
"""Longest wait for a message, so that recency gets written and a broken disk is retried."""
_LOCK_TIMEOUT_S = 5.0
_READERS_END_S = 1.0
_POLL_S = 0.1


class ModelTiers:
    """Owns the storage thread, the readers and their queues. Models are opened and closed at any time.

    Without `start`, `lock`, `open_directory` and `step` do the same work on the caller's thread.
    """

    def __init__(
        self,
        settings: StorageSettings,
        *,
        files: Files,
        clock: Clock,
        cipher: Cipher | None = None,
        make_tier: Callable[[StorageLoop, ReaderPool, OpenModel], LocalTier] = LocalTier,
    ) -> None:
        """With a `cipher`, every block is encrypted before it is written."""
        self._settings = settings
        self._make_tier = make_tier
        self._clock = clock
        self._threads: list[threading.Thread] = []
        self._store = BlockStore(settings, files=files, clock=clock, cipher=cipher)
        self._loop = StorageLoop(self._store, StorageState(settings))
        self._readers = ReaderPool(settings, files=files, clock=clock, report=self._count_read, cipher=cipher)

    def open(
        self, fingerprint: Fingerprint, details: Mapping[str, str], post: Callable[[Outcome], object]
    ) -> LocalTier:
        """Return the tier of one model, to be started by the caller. Any thread, even before `start` here.

        `post` is called on the storage and reader threads and must not block. Raises `StartError` if the
        fingerprint is already open and has not ended.
        """
        model = OpenModel(fingerprint, details, settings=self._settings, post=post)
        self._loop.models.claim(model)
        return self._make_tier(self._loop, self._readers, model)

    def lock(self) -> None:
        """Lock the directory for this process.

        Raises `StartError` naming the owner if another process has it. A disk that refuses for
        another reason does not stop the start: the tiers begin with writes off, and retry.
        """
        try:
            self._store.lock()
        except OSError as error:
            _log.error("cache_lock_refused", extra={"detail": str(error)})

    def start(self, *, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> None:
        """Start the readers and the storage thread, which locks and opens the directory.

        Raises what `lock` raises. A disk that does not answer in time does not stop the start: the tiers
        begin when it answers.
        """
        # The executor's thread starts with the first spill.
        self._store.syncs = ThreadPoolExecutor(max_workers=1, thread_name_prefix="storage-sync")
        locked: Future[None] = Future()
        self._start_thread("storage", lambda: self._run_loop(locked))
        for number in range(self._settings.reader_thread_count):
            self._start_thread(f"storage-reader-{number}", self._readers.run)
        try:
            locked.result(lock_timeout_s)
        except TimeoutError:
            locked.cancel()
            _log.error("cache_directory_hangs", extra={"waited_s": lock_timeout_s})
        except StartError:
            self._readers.stop()
            raise

    def close(self, *, deadline_time: float) -> None:
        """Finish spills until the deadline (`Clock.monotonic`), close the directory and end all models and
        the threads."""
        self._readers.stop()
        self._loop.send(partial(self._loop.close, deadline_time))

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the threads to end after `close`; False if the storage thread hangs or takes longer. Slow
        readers are not waited for: they end with the process."""
        end_time = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            while thread.is_alive() and self._clock.monotonic() < end_time:
                if self._loop.silence_s >= STALL_LIMIT_S:
                    return False
                thread.join(_POLL_S)
            # The first is the storage thread; the others are readers.
            end_time = min(end_time, self._clock.monotonic() + _READERS_END_S)
        return not (self._threads and self._threads[0].is_alive())

    def open_directory(self) -> None:
        """Open the directory on the calling thread; only without `start`."""
        self._loop.open()

    def step(self) -> bool:
        """Do one piece of work on the calling thread; False if none remains. Only without `start`."""
        has_read = self._readers.step()
        return self._loop.step() or has_read

    def _start_thread(self, name: str, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _count_read(self, model: OpenModel, report: ReadReport) -> None:
        self._loop.send(partial(self._loop.count_read, model, report))

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
                self._loop.models.end(StorageFailed(error.message))
                return False
        if locked.set_running_or_notify_cancel():
            locked.set_result(None)
        return True

    def _run(self, body: Callable[[], None]) -> None:
        """Top of each thread: an exception is reported once to all models, and ends the other threads too."""
        try:
            body()
        except Exception as error:
            _log.exception("storage_failed")
            self._loop.models.end(StorageFailed(f"{type(error).__name__}: {error}"))
            self._readers.stop()
