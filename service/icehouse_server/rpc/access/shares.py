"""Shares: slots and turns that callers divide among them, so that none can take them all. Event loop.

How much a caller may hold depends on what is free: at most `factor` times the free amount (dynamic
thresholds: Choudhury and Hahne, IEEE/ACM ToN 6(2), 1998). A single busy caller gets `factor / (1 + factor)`
of the total, and each of n gets `factor / (1 + n * factor)`, so something stays free for the next one. A
caller is a proved tenant, or a connection if callers prove nothing.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from icehouse_server.errors import Overloaded, Reason

Result = TypeVar("Result")

RETRY_S = 1.0
"""When to retry after a refusal; calls last seconds."""


class _Held:
    """How much of an amount each caller holds."""

    def __init__(self) -> None:
        self._held: collections.Counter[str] = collections.Counter()
        self._total = 0

    def _grant(self, origin: str, amount: int) -> None:
        self._held[origin] += amount
        self._total += amount

    def give_back(self, origin: str, amount: int = 1) -> None:
        """Return what a caller held."""
        self._total -= amount
        self._held[origin] -= amount
        if not self._held[origin]:
            del self._held[origin]


class FairShare(_Held):
    """Slots or bytes that a caller gets or is refused; nobody waits for them.

    With `most` no caller gets more than that, however much is free.
    """

    def __init__(self, *, limit: int, factor: float, what: str, most: int | None = None) -> None:
        super().__init__()
        assert limit >= 1 and factor > 0, (limit, factor)
        self.limit = limit
        self._factor = factor
        self._most = limit if most is None else most
        self._what = what

    @contextlib.contextmanager
    def hold(self, origin: str, amount: int = 1) -> Iterator[None]:
        """Hold slots until the block ends; raises Overloaded if the caller may have no more now."""
        self.take(origin, amount)
        try:
            yield
        finally:
            self.give_back(origin, amount)

    def take(self, origin: str, amount: int = 1) -> None:
        """Take slots until they are given back; raises as `hold` does."""
        held, more = self._held.get(origin, 0), amount - 1
        free = self.limit - self._total - more
        if free <= 0 or held + more >= min(self._factor * free, self._most):
            raise self._full(held=held)
        self._grant(origin, amount)

    def _full(self, *, held: int) -> Overloaded:
        if held >= self._most:
            return Overloaded(
                Reason.QUEUE_FULL,
                f"you have {held} {self._what} in flight, the most for one caller; end one, or try "
                "again later",
                retry_after_s=RETRY_S,
                metadata={"yours": held, "limit": self._most},
            )
        return Overloaded(
            Reason.QUEUE_FULL,
            f"{self._total} {self._what} are in flight, {held} of them yours; the limit is {self.limit}, of "
            "which part is reserved for others; try again later",
            retry_after_s=RETRY_S,
            metadata={"in_flight": self._total, "yours": held, "limit": self.limit},
        )


class QueueHold:
    """What one caller holds of a `FairQueue`."""

    def __init__(self, queue: FairQueue, origin: str, amount: int) -> None:
        self._queue = queue
        self._origin = origin
        self.amount = amount

    def shrink(self, amount: int) -> None:
        if amount < self.amount:
            self._queue.give_back(self._origin, self.amount - amount)
            self.amount = amount

    def release(self) -> None:
        self.shrink(0)


class FairQueue(_Held):
    """An amount that callers share by waiting for their turns: round-robin over callers, and first come,
    first served for each of them.

    Without a `factor` one caller may hold all of it while nobody else waits.
    """

    def __init__(self, *, capacity: int, factor: float | None = None) -> None:
        super().__init__()
        assert capacity >= 1, capacity
        self.capacity = capacity
        self._factor = factor
        self._waiting: collections.OrderedDict[str, collections.deque[tuple[int, asyncio.Future[None]]]] = (
            collections.OrderedDict()
        )

    @property
    def waiting_count(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    async def take(self, origin: str, amount: int = 1) -> QueueHold:
        """Wait for the caller's turn. An amount above the capacity counts as the capacity."""
        amount = min(amount, self.capacity)
        if self._waiting or not self._fits(origin, amount):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (amount, turn)
            self._waiting.setdefault(origin, collections.deque()).append(entry)
            self._hand_out()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give_back(origin, amount)
                else:
                    self._leave(origin, entry)
                raise
        else:
            self._grant(origin, amount)
        return QueueHold(self, origin, amount)

    @contextlib.asynccontextmanager
    async def turn(self, origin: str) -> AsyncIterator[None]:
        hold = await self.take(origin)
        try:
            yield
        finally:
            hold.release()

    def give_back(self, origin: str, amount: int = 1) -> None:
        """Return what a caller held and give it to those who wait."""
        super().give_back(origin, amount)
        self._hand_out()

    def _fits(self, origin: str, amount: int) -> bool:
        free = self.capacity - self._total
        held = self._held[origin]
        if amount > free:
            return False
        return self._factor is None or not held or held + amount <= self._factor * free

    def _hand_out(self) -> None:
        passed = 0
        while self._waiting and passed < len(self._waiting) and self._total < self.capacity:
            origin, queue = next(iter(self._waiting.items()))
            amount, turn = queue[0]
            self._waiting.move_to_end(origin)
            if not self._fits(origin, amount):
                passed += 1
                continue
            passed = 0
            queue.popleft()
            if not queue:
                del self._waiting[origin]
            if not turn.cancelled():
                self._grant(origin, amount)
                turn.set_result(None)

    def _leave(self, origin: str, entry: tuple[int, asyncio.Future[None]]) -> None:
        queue = self._waiting.get(origin)
        if queue is not None and entry in queue:
            queue.remove(entry)
            if not queue:
                del self._waiting[origin]
        self._hand_out()


async def ended(work: concurrent.futures.Future[Result], then: Callable[[], object]) -> Result:
    """Return the result of work in a thread, and run `then` on the event loop when the work ends.

    Work that has begun continues even if its caller leaves, so what it holds is released only at its end.
    """
    loop = asyncio.get_running_loop()

    def run_then() -> None:
        try:
            loop.call_soon_threadsafe(then)
        except RuntimeError:
            # The loop ended before the work did: nobody waits for a turn any more.
            if not loop.is_closed():
                raise

    work.add_done_callback(lambda _: run_then())
    return await asyncio.wrap_future(work)


def start_daemon(work: Callable[[], Result], *, name: str) -> concurrent.futures.Future[Result]:
    """Run work in its own daemon thread, so that neither other work nor the process waits for it."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # the system cannot start a thread
        future.set_exception(error)
    return future


def retrieve_error(work: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an error of work that nobody awaits any more. Callers that still wait get
    the error."""
    if not work.cancelled():
        work.exception()


_CALLER_LIMIT = 1024
"""Number of callers that are remembered; those whose turn has passed are forgotten first."""


class RateLimit:
    """A rate limit per caller: a burst, then a fixed number of turns per second. Times may be of any one
    clock.

    A refused call takes the event loop nearly as long as a short one that is served, and one with a long
    message as long as many. So a caller's first refusals are sent at once, and later ones are delayed.
    """

    def __init__(self, *, rate_per_s: float, burst_count: int) -> None:
        self._interval_s = 1 / rate_per_s
        self._burst_count = burst_count
        self._due_times: dict[str, float] = {}

    def delay_s(self, origin: str, *, now: float, longest_s: float, turn_count: float = 1) -> float:
        """Count a caller's next turns, and return how long to wait until they are due."""
        due_time = self._due_time(origin, now=now, turn_count=turn_count)
        # The delay is limited.
        self._due_times[origin] = due_time = min(due_time, now + longest_s)
        if len(self._due_times) > _CALLER_LIMIT:
            self._forget(now)
        return max(0.0, due_time - now)

    def take(self, origin: str, *, now: float) -> bool:
        """Count a caller's next turn if it is due; return whether it was."""
        due_time = self._due_time(origin, now=now, turn_count=1)
        # Accumulated rounding errors must not cost a turn.
        if due_time > now + 1e-6:
            return False
        self._due_times[origin] = due_time
        return True

    def _due_time(self, origin: str, *, now: float, turn_count: float) -> float:
        earliest = now - self._burst_count * self._interval_s
        return max(self._due_times.get(origin, earliest), earliest) + turn_count * self._interval_s

    def _forget(self, now: float) -> None:
        waiting = [(origin, due) for origin, due in self._due_times.items() if due > now]
        self._due_times = dict(waiting[-_CALLER_LIMIT // 2 :])
