"""Host copies: regions of blocks on their way to host memory, and what follows once they are there.

Where a pass is in flight a copy is made behind it, and looked at again in a later step: nothing waits for it
unless it must be there at once. How many bytes are on their way is bounded by the write queue, whose credit
each of them has. Inference thread only.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from icehouse_server.domain.blocks import Region
from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheRunner, HostCopy


class _OnItsWay(NamedTuple):
    block: BlockHash
    copy: HostCopy
    then: Callable[[HostCopy], None]


class HostCopies:
    """Copies in the order in which they were begun, which is the order in which they end."""

    def __init__(self, runner: CacheRunner) -> None:
        self._runner = runner
        self._on_their_way: collections.deque[_OnItsWay] = collections.deque()

    def begin(self, block: BlockHash, regions: Sequence[Region], then: Callable[[HostCopy], None]) -> None:
        """Have regions of a block copied and `then` called to take them, at once where that waits for
        nothing."""
        self._on_their_way.append(_OnItsWay(block, self._runner.begin_to_host(regions), then))
        self.proceed()

    def proceed(self, *, may_wait: bool = False) -> None:
        """Go on with the copies that are done; with `may_wait` with all."""
        while self._on_their_way and (may_wait or self._on_their_way[0].copy.is_done):
            self._go_on()

    def finish(self, blocks: Collection[BlockHash]) -> None:
        """Go on with the copies of these blocks, and those before, now: an order follows about them."""
        while any(each.block in blocks for each in self._on_their_way):
            self._go_on()

    def clear(self) -> None:
        """Forget all of them; what was to follow does not."""
        self._on_their_way.clear()

    def _go_on(self) -> None:
        _, copy, then = self._on_their_way.popleft()
        then(copy)
