"""What one live cache holds: which tokens lie where in its K/V arrays, for one row of it.

Knows the storage order of mlx-lm 0.32's cache classes and of their batch forms
(`mlx_lm/models/cache.py`): linear, in place with spare room, or as a ring. Inference thread only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

BATCH_FORMS: Final[dict[type, type]] = {KVCache: BatchKVCache, RotatingKVCache: BatchRotatingKVCache}
"""What mlx-lm merges a class into."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Tokens [end - count, end) of one sequence, at `first`, `first + 1`, ... along the token axis.

    Indices wrap at the axis' length: a full ring starts at its oldest token. Arrays are
    [batch, heads, slots, width]; `row` picks the sequence.
    """

    tensors: tuple[tuple[str, mx.array], ...]
    """(suffix, array), suffixes ascending: "k", "k.biases", "k.scales", "v", ..."""
    row: int
    first: int
    count: int
    end: int

    def cut(self, start: int, stop: int) -> tuple[tuple[str, mx.array], ...]:
        """Return tokens [start, stop) as lazy compact copies [1, heads, stop - start, width].

        `mx.contiguous` copies whenever the slice is much smaller than its buffer, so a block
        never keeps a whole cache alive.
        """
        assert 0 <= start < stop, (start, stop)
        assert self.end - self.count <= start and stop <= self.end, (
            f"Tokens [{start}, {stop}) were asked of a cache that holds [{self.end - self.count}, {self.end})"
        )
        return tuple((suffix, self._cut_one(array, start, stop)) for suffix, array in self.tensors)

    def _cut_one(self, array: mx.array, start: int, stop: int) -> mx.array:
        slots = array.shape[2]
        row = array[self.row : self.row + 1]
        low = self.first + start - (self.end - self.count)
        high = low + stop - start
        if low >= slots:
            low, high = low - slots, high - slots
        if high <= slots:
            return mx.contiguous(row[:, :, low:high, :])
        return mx.concatenate([row[:, :, low:, :], row[:, :, : high - slots, :]], axis=2)


def held(cache: Any, *, row: int) -> Held:
    """Describe one row of a K/V cache, single or batch; single caches have row 0 only."""
    kind = type(cache)
    if cache.keys is None:
        return Held((), row, 0, 0, 0)
    if kind is QuantizedKVCache:
        return Held(_quantized_tensors(cache), row, 0, cache.offset, cache.offset)
    tensors = (("k", cache.keys), ("v", cache.values))
    slots = cache.keys.shape[2]
    if kind is KVCache:
        return Held(tensors, row, 0, cache.offset, cache.offset)
    if kind is ChunkedKVCache:
        return Held(tensors, row, 0, cache.offset - cache.start_position, cache.offset)
    if kind is RotatingKVCache:
        if cache._idx == slots or cache._idx >= cache.offset:
            return Held(tensors, row, 0, cache._idx, cache.offset)
        return Held(tensors, row, cache._idx, slots, cache.offset)
    padding = max(0, _item(cache.left_padding, row))
    end = _item(cache.offset, row)
    if kind is BatchKVCache:
        assert cache._right_padding is None, "The batch is in the middle of a padded prefill"
        return Held(tensors, row, padding, cache._idx - padding, end)
    assert kind is BatchRotatingKVCache, kind
    assert cache._lengths is None, "The batch is in the middle of a padded prefill"
    if not cache.rotated:
        return Held(tensors, row, padding, cache._idx - padding, end)
    return Held(tensors, row, (cache._idx + padding) % slots, slots - padding, end)


def _quantized_tensors(cache: Any) -> tuple[tuple[str, mx.array], ...]:
    (keys, key_scales, key_biases), (values, value_scales, value_biases) = cache.keys, cache.values
    return (
        ("k", keys),
        ("k.biases", key_biases),
        ("k.scales", key_scales),
        ("v", values),
        ("v.biases", value_biases),
        ("v.scales", value_scales),
    )


def _item(array: mx.array, row: int) -> int:
    return int(np.asarray(array)[row])
