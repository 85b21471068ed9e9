"""Cache classes: which tokens lie where in a live cache's K/V arrays.

Knows the storage order of mlx-lm 0.32's cache classes (`mlx_lm/models/cache.py`): linear, in place with spare
room, or as a ring. Inference thread only.

The parts of a model's caches: each cache that is not a CacheList, where it is and how it is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.opaque_state import CacheUnsupported, check_holdable


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
        low = self.first + start - (self.end - self.count)
        high = low + stop - start
        if low >= slots:
            low, high = low - slots, high - slots
        if high <= slots:
            return mx.contiguous(array[:, :, low:high, :])
        return mx.concatenate([array[:, :, low:, :], array[:, :, : high - slots, :]], axis=2)


def held(cache: Any) -> Held:
    """Describe a K/V cache of one sequence."""
    kind = type(cache)
    if cache.keys is None:
        return Held((), 0, 0, 0)
    if kind is QuantizedKVCache:
        return Held(_quantized_tensors(cache), 0, cache.offset, cache.offset)
    tensors = (("k", cache.keys), ("v", cache.values))
    slots = cache.keys.shape[2]
    if kind is KVCache:
        return Held(tensors, 0, cache.offset, cache.offset)
    if kind is ChunkedKVCache:
        return Held(tensors, 0, cache.offset - cache.start_position, cache.offset)
    assert kind is RotatingKVCache, kind
    if cache._idx == slots or cache._idx >= cache.offset:
        return Held(tensors, 0, cache._idx, cache.offset)
    return Held(tensors, cache._idx, slots, cache.offset)


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


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One cache that is not a list: its place, and how it is cut."""

    name: str
    """"007", or "007.1" inside a CacheList; prefix of its tensors' names."""
    path: tuple[int, ...]
    cache_class: type
    kind: RegionKind
    window_token_count: int = 0
    """Length of the sliding window; 0 for the other kinds."""
    facts: tuple[int, ...] = ()
    """What must be equal for a restore: (group size, bits), slots of an ArraysCache."""


def leaf(caches: Sequence[Any], path: tuple[int, ...]) -> Any:
    """Return the cache at this place, inside CacheLists where the path goes on."""
    cache = caches[path[0]]
    for index in path[1:]:
        cache = cache.caches[index]
    return cache


def put(caches: list[Any], path: tuple[int, ...], cache: Any) -> None:
    """Set the cache at this place, inside CacheLists where the path goes on."""
    if len(path) == 1:
        caches[path[0]] = cache
        return
    parent = leaf(caches, path[:-1])
    parent.caches = tuple(cache if i == path[-1] else c for i, c in enumerate(parent.caches))


def parts_of(caches: Sequence[Any], *, path: tuple[int, ...] = ()) -> Iterator[Part]:
    """Yield every cache that is not a CacheList, depth first.

    Raises CacheUnsupported naming the class that can neither be cut nor held.
    """
    assert len(caches) <= (10 if path else 1000), f"Names of {len(caches)} caches would not sort"
    for index, cache in enumerate(caches):
        own_path = (*path, index)
        if type(cache) is CacheList:
            yield from parts_of(cache.caches, path=own_path)
        else:
            yield _part(cache, own_path)


def _part(cache: Any, path: tuple[int, ...]) -> Part:
    kind = type(cache)
    name = ".".join([f"{path[0]:03d}", *map(str, path[1:])])
    if kind is KVCache:
        return Part(name, path, kind, RegionKind.KV)
    if kind is QuantizedKVCache:
        return Part(name, path, kind, RegionKind.KV, facts=(cache.group_size, cache.bits))
    if kind is ChunkedKVCache:
        return Part(name, path, kind, RegionKind.WINDOW, window_token_count=cache.chunk_size)
    if kind is RotatingKVCache:
        if cache.keep:
            raise CacheUnsupported(kind.__name__, f"keeps its first {cache.keep} tokens for ever")
        return Part(name, path, kind, RegionKind.WINDOW, window_token_count=cache.max_size)
    check_holdable(cache)
    facts = (len(cache.cache),) if kind is ArraysCache else ()
    return Part(name, path, kind, RegionKind.CHECKPOINT, facts=facts)
