"""Pins: until when a block is pinned, as one number, and which pins end next.

The end of a pin is a `Clock.wall` time, so that the pin survives a restart.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from icehouse_server.domain.ids import BlockHash

NOT_PINNED: Final = 0.0
UNTIL_UNPINNED: Final = math.inf

_STALE_LIMIT = 64
"""Number of stale entries up to which the heap is not rebuilt."""


def pin_end_time(now: float, ordered: float) -> float:
    """Return when a pin that ends at `now` ends after a new command; pinning again never shortens it."""
    return max(now, ordered) if ordered else NOT_PINNED


class PinEnds:
    """The blocks whose pins expire by themselves. Each operation is O(log n) amortised."""

    def __init__(self) -> None:
        self._times: dict[BlockHash, float] = {}
        self._heap: list[tuple[float, BlockHash]] = []
        """An entry is valid while it agrees with `_times`."""

    def note(self, block: BlockHash, end_time: float) -> None:
        """Record when the pin of a block ends; NOT_PINNED and UNTIL_UNPINNED mean that none expires."""
        if end_time in (NOT_PINNED, UNTIL_UNPINNED):
            self._times.pop(block, None)
        elif self._times.get(block) != end_time:
            self._times[block] = end_time
            heapq.heappush(self._heap, (end_time, block))
        if len(self._heap) > 2 * len(self._times) + _STALE_LIMIT:
            self._heap = [(time, name) for name, time in self._times.items()]
            heapq.heapify(self._heap)

    def take(self, now_time: float) -> list[BlockHash]:
        """Return the blocks whose pins have ended, each once."""
        ended = []
        while self._heap and self._heap[0][0] <= now_time:
            time, block = heapq.heappop(self._heap)
            if self._times.get(block) == time:
                del self._times[block]
                ended.append(block)
        return ended
