"""Paging of one model: which of a row's caches lie in the page pool, and where the tokens of a pass do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from icehouse_server.engine.attention.port import PagedAttention, PoolShape, TokenPlaces
from icehouse_server.engine.kv.paged_cache import PagedCache
from icehouse_server.engine.kv.pool import PagePool
from icehouse_server.engine.kv.table import PageTable
from icehouse_server.engine.kv_cache.cache_classes import Cache
from icehouse_server.engine.kv_cache.load_target import KvShape


@dataclasses.dataclass(frozen=True, slots=True)
class Paging:
    """The layers of a model whose KV is in pages, the pool, and what attends to it."""

    pool: PagePool
    attention: PagedAttention
    layers: Mapping[int, int]
    """By a cache's place among a row's caches: the layer's number in the pool."""

    def caches(self, fresh: Sequence[Cache]) -> list[Cache]:
        """Return a new row's caches: these, and paged ones with one new table where KV is in pages."""
        table = PageTable(self.pool)
        return [
            PagedCache(table, self.layers[place]) if place in self.layers else cache
            for place, cache in enumerate(fresh)
        ]

    def places(self, tables: Sequence[PageTable], counts: Sequence[int]) -> TokenPlaces:
        """Return where the tokens lie that a pass brings: `counts` of each row, behind what it has."""
        begins = [table.token_count for table in tables]
        numbers = [
            table.numbers[: self.pool.pages_for(begin + count)]
            for table, begin, count in zip(tables, begins, counts, strict=True)
        ]
        starts = np.cumsum([0, *(len(each) for each in numbers[:-1])], dtype=np.int32)
        pages = np.fromiter(itertools.chain.from_iterable(numbers), np.int32)
        rows = np.repeat(np.arange(len(tables), dtype=np.int32), counts)
        if len(rows) == len(tables):
            positions = np.array(begins, np.int32)
        else:
            spans = [np.arange(b, b + count, dtype=np.int32) for b, count in zip(begins, counts, strict=True)]
            positions = np.concatenate(spans)
        return TokenPlaces(
            pages,
            starts,
            rows,
            positions,
            mx.array(pages),
            mx.array(starts),
            mx.array(rows),
            mx.array(positions),
        )


def table_of(caches: Sequence[Cache]) -> PageTable:
    """Return the page table of a row's caches; one that only counts where none of them is paged."""
    return next((cache.table for cache in caches if isinstance(cache, PagedCache)), PageTable())


def pool_shape(shapes: Sequence[KvShape], *, page_token_count: int) -> PoolShape | None:
    """Return the shape of a pool for such tensors, keys and values of each layer; None where these are not
    all alike, or are not what attention over pages takes."""
    like = {(shape.dtype, shape.head_count, shape.width) for shape in shapes}
    if len(like) != 1 or not shapes or len(shapes) % 2:
        return None
    dtype, head_count, width = like.pop()
    if not mx.issubdtype(dtype, mx.floating):
        return None
    return PoolShape(len(shapes) // 2, head_count, width, page_token_count, dtype)
