"""Caches of one sequence as mlx-lm makes them: one a layer, of the classes that the model asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

Cache = Any
"""One layer's cache: KVCache, RotatingKVCache, ArraysCache, CacheList, ..."""

CACHE_STEP_TOKEN_COUNT: int = KVCache.step
"""Tokens by which the caches of attention layers grow, whole layers being copied each time."""


def make_caches(model: Any) -> list[Cache]:
    """Return empty caches, one a layer, of the classes the model asks for."""
    return list(make_prompt_cache(model))


def quantize_caches(caches: Sequence[Cache], *, bits: int, group_size: int) -> list[Cache]:
    """Return fresh caches with every KVCache replaced by a quantized one, inside CacheLists too."""
    chosen: list[Cache] = []
    for cache in caches:
        if type(cache) is KVCache:
            chosen.append(QuantizedKVCache(group_size=group_size, bits=bits))
        elif type(cache) is CacheList:
            parts = quantize_caches(cache.caches, bits=bits, group_size=group_size)
            chosen.append(CacheList(*parts))  # type: ignore[no-untyped-call]
        else:
            chosen.append(cache)
    return chosen


def cache_states(caches: Sequence[Cache]) -> list[Any]:
    """Return the arrays that hold the caches' contents, for one eval."""
    return [cache.state for cache in caches]
