"""Admission of callers: a token is shown to the server before anything of a request but its headers is read.

The server answers calls with unknown tokens late when there are many, and all calls share one connection. So
few unknown callers are asked about at once, and those who are known do not wait behind them.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable

from icehouse_http.errors import ApiError

_KNOWN_FOR_S = 600.0
"""A token that was good is believed for so long here; the server checks it with every call."""
_REMEMBERED = 1024
_AT_ONCE = 32
_WAITING_LIMIT = 64
_RETRY_S = 1.0


class Admission:
    """Callers by their names (`Caller.name`). Event loop."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._waiting_count = 0

    async def admit(self, caller: str, ask: Callable[[], Awaitable[object]]) -> None:
        """Let a caller in for whom `ask` has returned not long ago; raises what it raises, or ApiError."""
        if time.monotonic() - self._known.get(caller, -_KNOWN_FOR_S) < _KNOWN_FOR_S:
            self._known.move_to_end(caller)
            return
        if self._waiting_count >= _WAITING_LIMIT:
            message = "too many callers are being checked with the server; try again later"
            raise ApiError(429, message, code="QUEUE_FULL", retry_s=_RETRY_S)
        self._waiting_count += 1
        try:
            async with self._turns:
                await ask()
        finally:
            self._waiting_count -= 1
        self._known[caller] = time.monotonic()
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
