"""Pools of random pages, rows that lie in them, and what attention over them is in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from icehouse_server.engine.attention.port import Ints, Pool, PoolShape, TokenPlaces

Numbers = np.ndarray[Any, np.dtype[np.float32]]


@dataclasses.dataclass(slots=True)
class RandomPool:
    """Implements Pool."""

    shape: PoolShape
    array: mx.array
    order: mx.array
    view: mx.array | None = None

    @classmethod
    def of(cls, shape: PoolShape, *, page_count: int, seed: int = 0) -> RandomPool:
        sizes = (
            page_count,
            shape.layer_count,
            2,
            shape.kv_head_count,
            shape.page_token_count,
            shape.head_size,
        )
        pool = cls(shape, normal(seed, *sizes, dtype=shape.dtype), mx.zeros((1,), mx.int32))
        mx.eval(pool.array, pool.order)
        return pool


def normal(seed: int, *sizes: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(sizes, np.float32)).astype(dtype)


def numbers(array: mx.array) -> Numbers:
    """Return them in float32, a copy."""
    return np.array(array.astype(mx.float32))


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


def places_in(tables: Sequence[Sequence[int]], tokens: Sequence[tuple[int, int]]) -> TokenPlaces:
    """Return the places of (row, position), in rows with these pages."""
    starts = np.cumsum([0, *(len(pages) for pages in tables[:-1])])
    pages = [page for table in tables for page in table]
    return TokenPlaces(
        pages=ints(pages),
        page_starts=ints(list(starts)),
        rows=ints([row for row, _ in tokens]),
        positions=ints([position for _, position in tokens]),
    )


def tables_for(
    token_counts: Sequence[int], *, page_token_count: int, page_count: int, seed: int = 0
) -> list[list[int]]:
    """Return pages of rows that hold so many tokens, none twice, in no order."""
    free = list(np.random.default_rng(seed).permutation(page_count))
    return [[int(free.pop()) for _ in range(-(-count // page_token_count))] for count in token_counts]


def keys_and_values(pool: Pool, places: TokenPlaces, row: int, layer: int, tokens: range) -> Numbers:
    """Return [2, tokens, KV heads, head size] of a row."""
    size = pool.shape.page_token_count
    pages = places.pages[places.page_starts[row] + np.array(tokens) // size]
    return numbers(pool.array[:, layer])[pages, :, :, np.array(tokens) % size].swapaxes(0, 1)


def attended(
    pool: Pool,
    queries: mx.array,
    places: TokenPlaces,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> Numbers:
    """Return what `PagedAttention.attend` must, in float32."""
    asked = numbers(queries)[:, :, 0]
    group = asked.shape[1] // pool.shape.kv_head_count
    found = np.empty_like(asked)
    for token, query in enumerate(asked):
        position = int(places.positions[token])
        seen = range(0 if window is None else max(0, position + 1 - window), position + 1)
        keys, values = keys_and_values(pool, places, int(places.rows[token]), layer, seen)
        logits = np.einsum("hd,khd->hk", query, np.repeat(keys, group, axis=1)) * scale
        if sinks is not None:
            logits = np.concatenate([logits, numbers(sinks)[:, None]], axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights = (weights / weights.sum(axis=1, keepdims=True))[:, : len(seen)]
        found[token] = np.einsum("hk,khd->hd", weights, np.repeat(values, group, axis=1))
    return found[:, :, None]
