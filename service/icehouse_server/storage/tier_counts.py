"""Counts of a tier's blocks, kept while they come and go: a million are told as quickly as ten.

Percentiles of ages are those of a sample. Names of blocks are digests, so those that begin with so many zero
bits are a fair part of all; up to some thousands of blocks the sample is all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from icehouse_server.domain.cache_stats import AgePercentiles, TierStats
from icehouse_server.domain.ids import BlockHash

_SAMPLE_LIMIT = 4096
"""Blocks in a sample; up to twice as many while they come."""
_NAME_BITS = 32
"""Of a name, those that are looked at."""


class TierCounts:
    """Of one tier, or of one model's blocks in it. Each thread has its own."""

    def __init__(self, names: Callable[[], Iterable[BlockHash]]) -> None:
        """`names` tells all blocks that are counted; asked for when few are left of very many."""
        self._names = names
        self._block_count = 0
        self._tail_count = 0
        self._pinned_count = 0
        self._token_count = 0
        self._sample: set[BlockHash] = set()
        self._zero_bit_count = 0
        """Leading bits that are zero in the names of the sample."""

    def __len__(self) -> int:
        return self._block_count

    def add(
        self, names: Collection[BlockHash], *, token_count: int, tail_count: int, pinned_count: int
    ) -> None:
        """Count blocks that came, with their tokens, and how many of them are tails and pinned."""
        self._block_count += len(names)
        self._token_count += token_count
        self._tail_count += tail_count
        self._pinned_count += pinned_count
        self._sample.update(filter(self._is_sampled, names))
        while len(self._sample) > 2 * _SAMPLE_LIMIT:
            self._zero_bit_count += 1
            self._sample = set(filter(self._is_sampled, self._sample))

    def remove(self, name: BlockHash, *, token_count: int, is_tail: bool, is_pinned: bool) -> None:
        """Count a block that went."""
        self._block_count -= 1
        self._token_count -= token_count
        self._tail_count -= is_tail
        self._pinned_count -= is_pinned
        self._sample.discard(name)
        if self._zero_bit_count and self._block_count << 2 < _SAMPLE_LIMIT << self._zero_bit_count:
            # All that are left are looked at once, and not again before half of them are gone.
            self._zero_bit_count = (self._block_count // _SAMPLE_LIMIT).bit_length()
            self._sample = set(filter(self._is_sampled, self._names()))

    def note_pinned(self, *, is_pinned: bool) -> None:
        """Count a pin that a block got or lost."""
        self._pinned_count += 1 if is_pinned else -1

    def fill(self, stats: TierStats, *, used_time: Callable[[BlockHash], float], now: float) -> TierStats:
        """Return a tier's statistics with these counts; `used_time` says when a block was last used."""
        return dataclasses.replace(
            stats,
            block_count=self._block_count,
            tail_count=self._tail_count,
            pinned_block_count=self._pinned_count,
            token_count=self._token_count,
            age=AgePercentiles.of(max(now - used_time(name), 0.0) for name in self._sample),
        )

    def _is_sampled(self, name: BlockHash) -> bool:
        return not int.from_bytes(name[: _NAME_BITS // 8], "big") >> (_NAME_BITS - self._zero_bit_count)
