"""Traffic: the event loop that all requests to the object store run on, in a thread of its own.

The engine's thread submits work for tickets, the storage thread calls functions here; neither waits. A task
that fails by a fault of ours is logged and fails its ticket alone: without the store the cache goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from icehouse_server.clock import Clock
from icehouse_server.storage.api import AnyTicket, Failure, Ticket, Trouble
from icehouse_server.storage.shared.fetcher import FetchJob

_log = logging.getLogger(__name__)

_JOB_LIMIT_COUNT = 64
"""Lookups and fetches under way."""
_WORKER_COUNT = 4
"""Threads that copy and check files."""
_POLL_S = 0.05


class Traffic:
    """Runs coroutines for tickets, and one for ever. `open` comes first; then `run`, or `step` by step."""

    def __init__(self, *, clock: Clock, post: Callable[[AnyTicket], object], is_inline: bool) -> None:
        """`is_inline`: files are read and written on the loop's own thread."""
        self._clock = clock
        self._post = post
        self._is_inline = is_inline
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = ThreadPoolExecutor(_WORKER_COUNT, thread_name_prefix="storage-shared")
        self._jobs: dict[AnyTicket, FetchJob] = {}
        """Put in by the engine's thread, taken out by the loop's."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = asyncio.Event()
        self.is_over = False
        """Whether no ticket is answered any more."""
        self._end_time = float("inf")
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether there is work beside the jobs."""

    def open(self, forever: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Make the loop, with this to run for ever."""
        self._loop = asyncio.new_event_loop()
        self._begin(forever)

    def run(self) -> None:
        """Run until the end; the body of the thread."""
        assert self._loop is not None, "open comes first"
        self._loop.run_until_complete(self._until_end())
        self.end()

    def step(self) -> bool:
        """Do what can be done now on the calling thread; False when nothing is left."""
        if self._loop is None:
            return False
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        return not self.is_over and (bool(self._jobs) or self.is_busy())

    def end(self) -> None:
        """Cancel what is under way and close the loop."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def close(self, *, deadline_time: float) -> None:
        """Answer no ticket from now on, and end at the deadline (`Clock.monotonic`) or when all is done."""
        self._end_time = deadline_time
        self.is_over = True
        self.call(self._closing.set)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function; any thread. Does nothing before `open` and after the end."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(function, *arguments)

    def submit(self, work: Callable[[FetchJob], Coroutine[Any, Any, Any]]) -> Ticket[Any] | None:
        """Do some work for a ticket; None when too much is under way. The engine's thread."""
        if self._loop is None or self.is_over or len(self._jobs) >= _JOB_LIMIT_COUNT:
            return None
        ticket: Ticket[Any] = Ticket()
        self._jobs[ticket] = FetchJob(self._clock.monotonic())
        self.call(self._begin, partial(self._answer, ticket, work))
        return ticket

    def job(self, ticket: AnyTicket) -> FetchJob | None:
        return self._jobs.get(ticket)

    async def offload(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that may take long."""
        call = partial(function, *arguments, **options)
        if self._is_inline:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

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
        outcome: Any = Failure(Trouble.UNUSABLE, "the object store's side has failed")
        try:
            outcome = await work(self._jobs[ticket])
        except Exception:
            _log.exception("shared_store_failed")
        finally:
            del self._jobs[ticket]
        if not self.is_over:
            ticket.finish(outcome)
            self._post(ticket)
