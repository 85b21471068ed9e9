"""Shared tier: the local tier, backed by an object store that other servers share.

Blocks written here are uploaded at the lowest priority. Blocks that a prompt lacks here are fetched from the
store before the prompt is planned; each becomes a checked file of the local tier. Loads know nothing of the
store. Manifest, limits and eviction are the local tier's. The store's objects are never listed, and never
removed to make space: the bucket's own rules do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from icehouse_server.clock import Clock
from icehouse_server.domain.cache_stats import CacheStats, SharedStats
from icehouse_server.storage.api import (
    AnyTicket,
    BlockPersisted,
    BlocksPurged,
    ChainFound,
    Fetched,
    Inventory,
    Names,
    Outcome,
    StorageClosed,
    StorageFailed,
    StorageFailure,
    StorageTrouble,
    Ticket,
)
from icehouse_server.storage.local.block_format.header import BlockFile
from icehouse_server.storage.local.open_model import OpenModel
from icehouse_server.storage.local.reader_pool import ReaderPool
from icehouse_server.storage.local.storage_loop import StorageLoop
from icehouse_server.storage.local.tier import LocalTier
from icehouse_server.storage.shared.fetcher import BlockFetcher, BlockFolder, FetchJob
from icehouse_server.storage.shared.object_store import ObjectStore, SharedSettings
from icehouse_server.storage.shared.uploader import Uploader

_log = logging.getLogger(__name__)

_TRAFFIC_END_S = 1.0
"""Longest wait for the traffic thread when a tier has ended."""


@dataclasses.dataclass(eq=False, slots=True)
class _Adoption(Ticket[BlockPersisted]):
    """A fetched file that the storage thread is to adopt."""

    done: Callable[[bool], None] = lambda is_adopted: None


class SharedTier(LocalTier):
    """A `LocalTier` whose `find` and `fetch` ask an object store, and which stores its full blocks there. It
    has its own thread for that.

    The engine never waits for the store: a lookup has a deadline, and a store that failed is left alone for a
    while, during which `find` returns None at once.
    """

    def __init__(
        self,
        loop: StorageLoop,
        readers: ReaderPool,
        model: OpenModel,
        *,
        store: ObjectStore,
        shared: SharedSettings,
        is_inline: bool = False,
    ) -> None:
        """`is_inline`: use no own threads; `step` does the work."""
        super().__init__(loop, readers, model)
        self._forward, model.post = model.post, self._receive
        self._shared_stats = SharedStats()
        self._is_inline = is_inline
        self._thread: threading.Thread | None = None
        self._traffic = StoreTraffic(clock=self._clock, post=self._forward, is_inline=is_inline)
        folder = BlockFolder(
            self._store.files,
            self._store.paths,
            fingerprint=model.fingerprint,
            cipher=self._store.cipher,
        )
        self._fetcher = BlockFetcher(
            store,
            folder,
            shared,
            clock=self._clock,
            stats=self._shared_stats,
            adopt=self._take_in,
            offload=self._traffic.offload,
        )
        self._uploader = Uploader(self._fetcher)
        self._traffic.is_busy = lambda: self._uploader.is_busy

    def start(self) -> None:
        self._traffic.open(self._uploader.run)
        if not self._is_inline:
            self._thread = threading.Thread(target=self._run_traffic, name="storage-shared", daemon=True)
            self._thread.start()
        super().start()

    def step(self) -> bool:
        """Do the work with the store that is possible now, on the calling thread; False if none remains."""
        if self._model.is_over:
            self._traffic.end()
            return False
        return self._traffic.step()

    def close(self, *, deadline_time: float) -> None:
        self._traffic.close(deadline_time=deadline_time)
        self._traffic.call(self._fetcher.end)
        super().close(deadline_time=deadline_time)

    def join(self, *, timeout_s: float) -> bool:
        has_ended = super().join(timeout_s=timeout_s)
        if has_ended and self._thread is not None:
            self._thread.join(_TRAFFIC_END_S)
        return has_ended

    def find(self, blocks: Names, *, limit_s: float) -> Ticket[ChainFound] | None:
        if not blocks or not self._fetcher.may_ask(blocks[0]):
            return None
        return self._traffic.submit(lambda job: self._fetcher.find(blocks, limit_s=limit_s))

    def fetch(self, blocks: Names) -> Ticket[Fetched] | None:
        return self._traffic.submit(lambda job: self._fetcher.fetch(blocks, job))

    def touch(self, blocks: Names) -> bool:
        # Each use gives another chance to a block that could not be stored when it was written.
        self._traffic.call(self._uploader.offer, blocks[::-1])
        return super().touch(blocks)

    def delete(self, blocks: Names, *, is_final: bool = False) -> Ticket[BlocksPurged] | None:
        if is_final:
            self._traffic.call(self._uploader.delete, blocks)
        return super().delete(blocks)

    def abandon(self, ticket: AnyTicket) -> None:
        job = self._traffic.job(ticket)
        if job is not None:
            job.is_abandoned = True
        super().abandon(ticket)

    def silence_s(self, ticket: AnyTicket) -> float:
        job = self._traffic.job(ticket)
        return super().silence_s(ticket) if job is None else self._clock.monotonic() - job.progress_time

    def leave_cores(self, *, to_decode: bool) -> None:
        super().leave_cores(to_decode=to_decode)
        share = self._store.settings.share_beside_decode if to_decode else 1.0
        self._uploader.pause_s = lambda worked_s: worked_s * (1.0 / share - 1.0)

    async def _take_in(self, file: BlockFile, partial: str) -> bool:
        """Have the storage thread adopt a fetched file; return whether it is a block now."""
        adopted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket = _Adoption(done=lambda is_adopted: self._traffic.call(_resolve, adopted, is_adopted))
        self._adopt(ticket, file, partial)
        is_adopted, name = await adopted, file.outline.hash
        if is_adopted and self._fetcher.refused.has(name, self._clock.monotonic()):
            # Its deletion was ordered during the fetch, and found nothing to delete.
            self._discard(_Adoption(), name)
            return False
        return is_adopted

    def _receive(self, outcome: Outcome) -> None:
        """Forward what the local tier posts, on its threads, and note what concerns the store."""
        if isinstance(outcome, _Adoption):
            stored = outcome.outcome
            if isinstance(stored, BlockPersisted):
                self._forward(Inventory((stored.record,), is_first=False, is_last=False))
            outcome.done(isinstance(stored, BlockPersisted))
            return
        if isinstance(outcome, Ticket):
            if isinstance(outcome.outcome, BlockPersisted):
                self._traffic.call(self._uploader.offer, (outcome.outcome.record.hash,))
            elif isinstance(outcome.outcome, CacheStats):
                outcome.outcome = dataclasses.replace(outcome.outcome, shared=self._copy_stats())
        elif isinstance(outcome, StorageFailed) or (
            isinstance(outcome, StorageClosed) and not self._traffic.is_over
        ):
            self._traffic.close(deadline_time=self._clock.monotonic())
        self._forward(outcome)

    def _run_traffic(self) -> None:
        """Top of the thread."""
        try:
            self._traffic.run()
        except Exception as error:
            _log.exception("storage_failed")
            self._model.end(StorageFailed(f"{type(error).__name__}: {error}"))

    def _copy_stats(self) -> SharedStats:
        return dataclasses.replace(
            self._shared_stats,
            queue_count=self._uploader.queue_count,
            read_pause_detail=self._fetcher.breaker.pause_detail,
            write_pause_detail=self._uploader.breaker.pause_detail,
        )


def _resolve(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


_JOB_LIMIT_COUNT = 64
"""Most lookups and fetches in flight."""
_WORKER_COUNT = 4
"""Threads that copy and check files."""
_POLL_S = 0.05


class StoreTraffic:
    """Runs coroutines for tickets, and one permanent coroutine, on its own event loop. Call `open` first,
    then either `run` or `step` repeatedly.

    The engine's thread submits work for tickets, the storage thread calls functions here; neither waits. An
    unexpected exception in a task is logged and fails only its ticket: the cache continues without the store.
    """

    def __init__(self, *, clock: Clock, post: Callable[[AnyTicket], object], is_inline: bool) -> None:
        """`is_inline`: files are read and written on the loop's own thread."""
        self._clock = clock
        self._post = post
        self._is_inline = is_inline
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = ThreadPoolExecutor(_WORKER_COUNT, thread_name_prefix="storage-shared")
        self._jobs: dict[AnyTicket, FetchJob] = {}
        """Added by the engine's thread, removed by the loop's."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self.is_over = False
        """Whether tickets are no longer answered."""
        self._end_time = float("inf")
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether there is work other than the jobs."""

    def open(self, forever: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Create the loop, with `forever` as its permanent coroutine."""
        self._loop = asyncio.new_event_loop()
        self._begin(forever)

    def run(self) -> None:
        """Run until the end, as the body of the thread."""
        assert self._loop is not None, "open comes first"
        self._loop.run_until_complete(self._until_end())
        self.end()

    def step(self) -> bool:
        """Do the work that is possible now on the calling thread; False if none remains."""
        if self._loop is None:
            return False
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        return not self.is_over and (bool(self._jobs) or self.is_busy())

    def end(self) -> None:
        """Cancel all tasks and close the loop."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
        self._workers.shutdown()
        loop.close()

    def close(self, *, deadline_time: float) -> None:
        """Answer no more tickets, and end at the deadline (`Clock.monotonic`) or when all work is done."""
        self._end_time = deadline_time
        self.is_over = True
        self.call(self._closing.set)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function; any thread. Does nothing before `open` and after the end."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(function, *arguments)

    def submit(self, work: Callable[[FetchJob], Coroutine[Any, Any, Any]]) -> Ticket[Any] | None:
        """Start work for a ticket; None if too much is in flight. The engine's thread."""
        if self._loop is None or self.is_over or len(self._jobs) >= _JOB_LIMIT_COUNT:
            return None
        ticket: Ticket[Any] = Ticket()
        self._jobs[ticket] = FetchJob(self._clock.monotonic())
        self.call(self._begin, partial(self._answer, ticket, work))
        return ticket

    def job(self, ticket: AnyTicket) -> FetchJob | None:
        return self._jobs.get(ticket)

    async def offload(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that may take long, on a worker thread unless inline."""
        call = partial(function, *arguments, **options)
        if self._is_inline:
            return call()
        # It runs even if the waiting task is cancelled: the function may be the one that closes a file.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._workers, call))

    async def _until_end(self) -> None:
        await self._closing.wait()
        while self.is_busy() and self._clock.monotonic() < self._end_time:
            await asyncio.sleep(_POLL_S)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._loop is None:
            return
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, ticket: AnyTicket, work: Callable[[FetchJob], Awaitable[Any]]) -> None:
        outcome: Any = StorageFailure(StorageTrouble.UNUSABLE, "the object store's side has failed")
        try:
            outcome = await work(self._jobs[ticket])
        except Exception:
            _log.exception("shared_store_failed")
        finally:
            del self._jobs[ticket]
        if not self.is_over:
            ticket.finish(outcome)
            self._post(ticket)
