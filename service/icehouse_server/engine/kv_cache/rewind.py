"""Rewind of a draft model's caches: where they stood before guesses were fed one by one, and back again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from icehouse_server.engine.kv_cache.caches import Cache


def can_rewind(caches: Sequence[Cache]) -> bool:
    """Tell whether tokens can be taken back out of these caches, however they were fed."""
    parts = [part for cache in caches for part in (cache.caches if type(cache) is CacheList else (cache,))]
    return bool(parts) and all(
        type(part) in (KVCache, QuantizedKVCache) or (type(part) is RotatingKVCache and part.keep == 0)
        for part in parts
    )


class CacheMark(NamedTuple):
    """Where one cache stood: its arrays, which later updates leave alone, and its numbers."""

    cache: Cache
    arrays: tuple[Any, Any] | None
    offset: int
    place: int


def mark(caches: Sequence[Cache]) -> list[CacheMark]:
    """Remember where caches that `can_rewind` stand. Windows are kept as they are; KV is only cut back."""
    marks: list[CacheMark] = []
    for cache in caches:
        if type(cache) is CacheList:
            marks += mark(cache.caches)
        elif type(cache) is RotatingKVCache:
            # New array objects: an update writes into the ones that the cache has.
            window: Any = cache
            arrays = (window.keys[...], window.values[...])
            marks.append(CacheMark(cache, arrays, cache.offset, cache._idx))
        else:
            marks.append(CacheMark(cache, None, cache.offset, 0))
    return marks


def return_to(marks: Sequence[CacheMark]) -> None:
    """Undo every update since the marks were made."""
    for cache, arrays, offset, place in marks:
        if arrays is None:
            cache.trim(cache.offset - offset)
        else:
            cache.keys, cache.values = arrays
            cache.offset, cache._idx = offset, place
