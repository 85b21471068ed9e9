"""Loop timeout: as asyncio.timeout, for what has not come although the event loop looked for it.

When the loop stood still, a plain timer and what came meanwhile are due in one and the same turn, and the
timer wins. This one is made of short parts: however long the loop stands still, that is one of them, and the
others are time to find what has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_PART_COUNT = 8


@contextlib.asynccontextmanager
async def of(timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise TimeoutError out of the block once the loop has had so long for it; the timer may be moved up."""
    loop = asyncio.get_running_loop()
    part: asyncio.TimerHandle | None = None

    def begin(left_count: int) -> None:
        nonlocal part
        if left_count:
            part = loop.call_later(timeout_s / _PART_COUNT, begin, left_count - 1)
        elif not timer.expired():
            timer.reschedule(loop.time())

    async with asyncio.timeout(None) as timer:
        begin(_PART_COUNT)
        try:
            yield timer
        finally:
            if part is not None:
                part.cancel()
