"""Flush: after a drain, RAM's blocks are written to SSD under a deadline (inference thread)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from icehouse_server.clock import Clock
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.spill import Spills

_log = logging.getLogger("icehouse.engine")

_CHECK_INTERVAL_S = 0.5
"""How often a hang of the storage thread is checked for."""


class Flush:
    """Blocks in RAM on their way to SSD, the last of `nodes` first; no request accounts for them."""

    def __init__(self, spills: Spills, nodes: Sequence[Node]) -> None:
        self._spills = spills
        self._waiting = list(nodes)

    @property
    def left_count(self) -> int:
        """Blocks that are neither written nor dropped yet."""
        return len(self._waiting) + self._spills.under_way_count

    def proceed(self) -> bool:
        """Send as much as the write queue takes; False when all of it is written or dropped."""
        while self._waiting:
            # With nothing under way the queue is empty: a block that does not fit now never will.
            if self._spills.under_way_count and not self._spills.has_credit(self._waiting[-1]):
                break
            self._spills.send(self._waiting.pop(), request_id=None)
        self._spills.hand_over(may_wait=True)
        return self.left_count > 0


def flush(
    under_way: Flush,
    *,
    wait: Callable[[float], None],
    is_stalled: Callable[[], bool],
    clock: Clock,
    deadline_time: float,
) -> None:
    """Spill until all is written or dropped, the deadline passes or the thread `is_stalled`; log the result.

    `wait` takes in the storage thread's reports, for at most so many seconds.
    """
    began_time = clock.monotonic()
    block_count = under_way.left_count
    if not block_count:
        return
    _log.info("flush_started", extra={"block_count": block_count})
    while under_way.proceed() and clock.monotonic() < deadline_time and not is_stalled():
        wait(min(_CHECK_INTERVAL_S, deadline_time - clock.monotonic()))
    left_count = under_way.left_count
    facts = {"block_count": block_count - left_count, "left_count": left_count}
    _log.info("flush_ended", extra={**facts, "duration_s": round(clock.monotonic() - began_time, 3)})
