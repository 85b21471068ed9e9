"""Reach along a chain: how many blocks of a chain, from its first, an object store has.

Found by asking for names, without a listing: a few at once, first at doubling distances, then within the gap
that is left. A chain of 1,000 blocks takes three rounds of some ten requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_PROBE_COUNT = 8
"""Names that are asked for at once."""


class ChainReach:
    """One search. What it knows is there for whoever stops it early."""

    def __init__(self, count: int, size_of: Callable[[int], Awaitable[int | None]]) -> None:
        """`size_of` returns the bytes of the block with an index; None where it is not there."""
        self._size_of = size_of
        self._limit = count
        self.found_count = 0
        """Blocks that are there as far as is known: a hole between two that are is not looked for."""
        self._sizes: list[int] = []
        self._answer_count = 0

    @property
    def has_answers(self) -> bool:
        """Whether the store has answered at all."""
        return self._answer_count > 0

    @property
    def size_bytes(self) -> int:
        """About, of all that were found together."""
        return self.found_count * sum(self._sizes) // len(self._sizes) if self._sizes else 0

    async def run(self) -> None:
        """Search until the end is known. Raises what `size_of` raises."""
        probes = [count for power in range(self._limit.bit_length()) if (count := 1 << power) < self._limit]
        probes.append(self._limit)
        while self.found_count < self._limit:
            answers = await asyncio.gather(*map(self._ask, probes))
            absent = next((count for count, is_there in zip(probes, answers, strict=True) if not is_there), 0)
            if absent:
                self._limit = absent - 1
                self.found_count = min(self.found_count, self._limit)
            gap = self._limit - self.found_count
            steps = min(_PROBE_COUNT, gap)
            probes = [self.found_count + gap * step // steps for step in range(1, steps + 1)]

    async def _ask(self, count: int) -> bool:
        size_bytes = await self._size_of(count - 1)
        self._answer_count += 1
        if size_bytes is None:
            return False
        self._sizes.append(size_bytes)
        self.found_count = max(self.found_count, count)
        return True
