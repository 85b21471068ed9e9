"""Rewind: tokens taken back out of caches, full sliding windows included (inference thread)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from icehouse_server.engine.kv_cache.batching import Cache


def can_rewind(caches: Sequence[Cache]) -> bool:
    """Tell whether tokens that were fed together can be taken back out of these caches."""
    parts = [part for cache in caches for part in (cache.caches if type(cache) is CacheList else (cache,))]
    return bool(parts) and all(
        type(part) in (KVCache, QuantizedKVCache) or (type(part) is RotatingKVCache and part.keep == 0)
        for part in parts
    )


def rewind(caches: Sequence[Cache], count: int) -> None:
    """Take the last `count` tokens back, fewer than were fed in the last pass; `can_rewind` said so.

    Relies on `trim` moving only `offset`, and on a RotatingKVCache that was fed several tokens at once
    holding them in order, after a full window of those before: nothing was overwritten yet.
    """
    if not count:
        return
    for cache in caches:
        if type(cache) is CacheList:
            rewind(cache.caches, count)
        elif type(cache) is RotatingKVCache:
            keys, values = cache.keys_and_values()  # type: ignore[no-untyped-call]
            cache.keys, cache.values = keys[..., :-count, :], values[..., :-count, :]
            cache.offset -= count
            cache._idx -= count
        else:
            taken = cache.trim(count)
            assert taken == count, f"{type(cache).__name__} took back {taken} of {count} tokens"


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
