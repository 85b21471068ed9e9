"""An event loop whose time is the story's and whose threads are jobs: nothing happens but by a step."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from icehouse_server.engine.engine import Engine
from icehouse_server.storage.local.tier import LocalTier

from tests.system.sim.clock import SimClock


@dataclasses.dataclass(eq=False, slots=True)
class ThreadJob:
    """What another thread would do, in one piece; a `join` is done once what it waits for has ended."""

    work: functools.partial[Any]
    future: asyncio.Future[Any]
    began_time: float

    def is_due(self, now: float) -> bool:
        owner = self._joined
        if owner is None:
            return True
        ended = owner._ended if isinstance(owner, Engine) else owner._model.ended
        return ended.is_set() or now >= self._end_time

    def run(self) -> None:
        """Do it and tell the event loop. A crash of the machine is told to nobody."""
        owner = self._joined
        if owner is not None:
            ended = owner._ended if isinstance(owner, Engine) else owner._model.ended
            self._finish(ended.is_set())
            return
        try:
            self._finish(self.work())
        except Exception as error:
            if not self.future.cancelled():
                self.future.set_exception(error)

    def _finish(self, result: Any) -> None:
        if not self.future.cancelled():
            self.future.set_result(result)

    @property
    def _joined(self) -> Engine | LocalTier | None:
        owner = getattr(self._function, "__self__", None)
        is_join = isinstance(owner, Engine | LocalTier) and self._function.__name__ == "join"
        return owner if is_join else None

    @property
    def _end_time(self) -> float:
        return self.began_time + self.work.keywords["timeout_s"]

    @property
    def _function(self) -> Callable[..., Any]:
        """Of `asyncio.to_thread`, which hands over `context.run` of it; of others their first argument."""
        return self.work.args[0]


class StoryLoop(asyncio.SelectorEventLoop):
    """Runs one round of callbacks at a time; what it gives to threads waits in `jobs`."""

    _ready: collections.deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, clock: SimClock) -> None:
        super().__init__()
        self._story_clock = clock
        self.jobs: list[ThreadJob] = []

    def time(self) -> float:
        return self._story_clock.now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        # There is one thread, so nobody sleeps who had to be woken.
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()
        self.jobs.append(ThreadJob(functools.partial(func, *args), future, self.time()))
        return future

    @property
    def has_work(self) -> bool:
        """Whether a callback waits, or a timer is due."""
        timers = (timer for timer in self._scheduled if not timer.cancelled())
        return bool(self._ready) or any(timer.when() <= self.time() for timer in timers)

    def due_jobs(self) -> list[ThreadJob]:
        return [job for job in self.jobs if job.is_due(self.time())]

    def do(self, job: ThreadJob) -> None:
        self.jobs.remove(job)
        job.run()

    def step(self) -> None:
        """Run what is ready, once."""
        self.call_soon(self.stop)
        self.run_forever()
