"""Page groups of a model: which of its layers have KV that fits in pages, and which of these share a pool."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import mlx.core as mx

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.attention.port import PoolShape
from icehouse_server.engine.kv_cache.cache_classes import Cache, PlainKv, RotatingKv, class_of, is_list

PAGE_TOKEN_COUNT: Final = 64
"""Maximum tokens of a page, and so the most that a row can waste."""
_WINDOW_ROWS: Final = 256
_PASS_TOKENS: Final = 8192
"""Pools of windows begin with room for this many rows and for the tokens of one pass. A pool that has to grow
is copied."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupFacts:
    """Layers that share a pool, and a run of pages in each row."""

    shape: PoolShape
    layers: Mapping[int, int]
    """The layer's number in the pool, by its cache's index among a row's caches."""
    window: int | None


def page_token_count_for(block_token_count: int) -> int:
    """Return how many tokens a page has: a divisor of the block's token count."""
    return math.gcd(PAGE_TOKEN_COUNT, block_token_count)


def groups_of(
    caches: Sequence[Cache], *, attending: Collection[int], page_token_count: int
) -> tuple[GroupFacts, ...]:
    """Return the groups of a model; none if layers of unlimited context differ in their KV.

    `caches` hold some tokens; `attending` has the indices of those that only attention reads.
    """
    groups: dict[tuple[int | None, int, int, mx.Dtype], list[int]] = {}
    for index in attending:
        like = _like(caches[index])
        if like is not None:
            groups.setdefault(like, []).append(index)
    unlimited = [indices for (window, *_), indices in groups.items() if window is None]
    kv_count = sum(is_list(cache) or class_of(cache).kind is RegionKind.KV for cache in caches)
    if len(unlimited) > 1 or sum(map(len, unlimited)) != kv_count:
        return ()
    return tuple(
        GroupFacts(
            PoolShape(len(indices), head_count, size, page_token_count, dtype),
            {index: layer for layer, index in enumerate(indices)},
            window,
        )
        for (window, head_count, size, dtype), indices in groups.items()
    )


def pool_sizes(
    facts: Sequence[GroupFacts], *, size_bytes: int, array_limit_bytes: int | None = None
) -> list[int]:
    """Return the size of each group's pool in bytes, `size_bytes` in all. If other layers keep every token,
    windows get only what many rows need. No pool exceeds `array_limit_bytes`, since it is one array."""
    whole_bytes = sum(each.shape.page_bytes for each in facts)
    sizes = [size_bytes * each.shape.page_bytes // whole_bytes for each in facts]
    unlimited = [number for number, each in enumerate(facts) if each.window is None]
    for number, each in enumerate(facts):
        if each.window is not None and unlimited:
            token_count = _WINDOW_ROWS * (each.window + 2 * PAGE_TOKEN_COUNT) + _PASS_TOKENS
            most = token_count // each.shape.page_token_count * each.shape.page_bytes
            sizes[unlimited[0]] += max(0, sizes[number] - most)
            sizes[number] = min(sizes[number], most)
    return sizes if array_limit_bytes is None else [min(size, array_limit_bytes) for size in sizes]


def _like(cache: Cache) -> tuple[int | None, int, int, mx.Dtype] | None:
    """Return the window, KV heads, head size and dtype of a layer; None if it cannot be in pages."""
    entry = class_of(cache)
    if not (isinstance(entry, RotatingKv) and not cache.keep) and not (
        isinstance(entry, PlainKv) and entry.is_plain
    ):
        return None
    keys, values = cache.keys, cache.values
    like = (keys.shape[1], keys.shape[3], keys.dtype)
    if like != (values.shape[1], values.shape[3], values.dtype) or not mx.issubdtype(keys.dtype, mx.floating):
        return None
    return entry.window_token_count(cache) or None, *like
