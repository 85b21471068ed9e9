"""The parts of a model's caches: each cache that is not a CacheList, where it is and how it is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from service.domain.blocks import RegionKind
from service.kv.layout_whole import CacheUnsupported, check_holdable


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
    if kind in (BatchKVCache, BatchRotatingKVCache):
        raise CacheUnsupported(kind.__name__, "is a batch; the layout is read off single caches")
    check_holdable(cache)
    facts = (len(cache.cache),) if kind is ArraysCache else ()
    return Part(name, path, kind, RegionKind.CHECKPOINT, facts=facts)
