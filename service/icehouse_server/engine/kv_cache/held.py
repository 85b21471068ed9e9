"""Tokens held by one live cache: which of them lie where along the token axis of its K/V arrays.

Linear, in place with spare room, or as a ring. Inference thread only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx

from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Tokens [end - count, end) of one sequence, at `first`, `first + 1`, ... along the token axis.

    Indices wrap at the axis' length: a full ring starts at its oldest token. Arrays are
    [1, heads, slots, width].
    """

    tensors: tuple[tuple[str, mx.array], ...]
    """(suffix, array), suffixes ascending: "k", "k.biases", "k.scales", "v", ..."""
    first: int
    count: int
    end: int

    def cut(self, start: int, stop: int) -> tuple[tuple[str, mx.array], ...]:
        """Return tokens [start, stop), [1, heads, stop - start, width], lazy and not copied yet."""
        assert 0 <= start < stop, (start, stop)
        assert self.end - self.count <= start and stop <= self.end, (
            f"Tokens [{start}, {stop}) were asked of a cache that holds [{self.end - self.count}, {self.end})"
        )
        return tuple((suffix, self._cut_one(array, start, stop)) for suffix, array in self.tensors)

    def _cut_one(self, array: mx.array, start: int, stop: int) -> mx.array:
        slots = array.shape[TOKEN_AXIS]
        low = self.first + start - (self.end - self.count)
        high = low + stop - start
        if low >= slots:
            low, high = low - slots, high - slots
        if high <= slots:
            return array[:, :, low:high, :]
        return mx.concatenate([array[:, :, low:, :], array[:, :, : high - slots, :]], axis=TOKEN_AXIS)


def none_held() -> Held:
    """Return what a cache holds that was never fed."""
    return Held((), 0, 0, 0)


def keys_and_values(cache: Any) -> tuple[tuple[str, mx.array], ...]:
    """Return the tensors of a cache that keeps one array of keys and one of values."""
    return (("k", cache.keys), ("v", cache.values))
