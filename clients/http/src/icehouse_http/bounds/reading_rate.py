"""Rate at which callers may have large bodies read: one who sends many must leave the event loop to others.

A large body makes its caller wait before the next one is read, several times as long as it took itself. Few
of one caller's are read at once; those of different callers do not wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

SMALL_BYTES = 64 << 10
"""Bodies of up to so many bytes cost nothing: agents send them all the time."""
_AT_ONCE = 4
_WORK_S = 2e-6
"""How long a unit of work makes its caller wait: about four times what it takes (`JsonSize.work`)."""


@dataclasses.dataclass(slots=True)
class _Caller:
    turns: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    due_time: float = 0.0
    body_count: int = 0


class ReadingRate:
    """Whose large bodies are read when. Event loop."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait until another large body of the caller may be read, and read it in the block."""
        caller = self._callers.setdefault(name, _Caller())
        caller.body_count += 1
        try:
            async with caller.turns:
                await asyncio.sleep(caller.due_time - asyncio.get_running_loop().time())
                yield
        finally:
            caller.body_count -= 1
            self._forget(name)

    def charge(self, name: str, work: int) -> None:
        """Count a body that was read in the caller's turn."""
        now = asyncio.get_running_loop().time()
        caller = self._callers[name]
        caller.due_time = max(caller.due_time, now) + work * _WORK_S

    def _forget(self, name: str) -> None:
        """Forget a caller as soon as it need not wait any more."""
        caller, loop = self._callers.get(name), asyncio.get_running_loop()
        if caller is None or caller.body_count:
            return
        if caller.due_time <= loop.time():
            del self._callers[name]
        else:
            loop.call_at(caller.due_time, self._forget, name)
