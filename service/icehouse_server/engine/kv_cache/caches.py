"""Caches of one sequence as mlx-lm makes them: one a layer, of the classes that the model asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from icehouse_server.engine.kv_cache.cache_classes import Cache, class_of, leaves, leaves_at, of_mlx_lm, put


def make_caches(model: Any) -> list[Cache]:
    """Return empty caches, one a layer, of the classes the model asks for.

    mlx-vlm has classes of its own, of the same names: where a model asks for these, it is given mlx-lm's,
    which blocks are cut from. Raises ModelError for one that is not known here.
    """
    return [of_mlx_lm(cache) for cache in make_prompt_cache(model)]


def quantize_caches(caches: Sequence[Cache], *, bits: int, group_size: int) -> list[Cache]:
    """Return these fresh caches, replaced by quantized ones where there are some; lists are changed."""
    chosen = list(caches)
    for leaf, path in list(leaves_at(caches)):
        put(chosen, path, class_of(leaf).quantized(leaf, bits=bits, group_size=group_size))
    return chosen


def cache_states(caches: Sequence[Cache]) -> list[Any]:
    """Return the arrays that hold the caches' contents, for one eval."""
    return [cache.state for cache in caches]


def step_token_count(caches: Sequence[Cache]) -> int:
    """Return by how many tokens these caches grow at a time, at most; whole layers are copied each time."""
    return max((class_of(leaf).step_token_count for leaf in leaves(caches)), default=1)
