"""Paged caches of a model: each is one layer's cache of one row, with keys and values in the page pool.

They replace mlx-lm's caches in a row: plain ones, or ones with a sliding window. Attention reads the pages
directly; keys and values that are asked for here are copied out. Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from icehouse_server.engine.kv.page_table import PageGroup, PageRun, PageTable, places_of
from icehouse_server.engine.kv_cache.cache_classes import Arrays, Cache, CacheClass, PlainKv, RotatingKv, Undo
from icehouse_server.engine.kv_cache.regions import TokenArrays


class PagedCache:
    """Answers what a plain cache is asked outside of a pass."""

    cache_class: ClassVar[CacheClass]
    __slots__ = ("layer", "run", "table")

    def __init__(self, table: PageTable, run: PageRun, layer: int) -> None:
        """`layer` is the layer's number within the run's pool."""
        self.table = table
        self.run = run
        self.layer = layer

    @property
    def offset(self) -> int:
        return self.table.token_count

    @property
    def state(self) -> Any:
        """An array that is computed once all writes are done."""
        return self.run.group.pool.order

    @property
    def nbytes(self) -> int:
        shape = self.run.group.pool.shape
        page_count = len(self.run.pages) - self.run.numbers.count(-1)
        return page_count * shape.page_bytes // shape.layer_count

    def empty(self) -> bool:
        return not self.offset

    def make_mask(self, N: int, **asked: Any) -> Any:
        """Return the mask of a plain cache with as many tokens."""
        return create_attention_mask(N, offset=self.offset, **asked)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise AssertionError("Keys and values of pages are written by attention, for all rows at once")

    def tokens(self) -> TokenArrays:
        """Return copies of the keys and values, [1, heads, tokens, size], lazily."""
        group, count = self.run.group, self.offset
        if not count:
            return TokenArrays()
        begin = self.run.numbers.count(-1) * group.pool.shape.page_token_count
        places = places_of([self.run], [count - 1], [1])
        keys, values = group.attention.gather_row(
            group.pool, places, row=0, layer=self.layer, first_token=begin, key_count=count - begin
        )
        return TokenArrays((("k", keys), ("v", values)), 0, count - begin, count)


class PagedWindowCache(PagedCache):
    """The same for a cache with a sliding window."""

    __slots__ = ()
    keep = 0

    @property
    def max_size(self) -> int:
        window = self.run.group.window
        assert window is not None
        return window

    def make_mask(self, N: int, **asked: Any) -> Any:
        """Return None, since attention over pages knows the window."""
        if not asked.get("return_array"):
            return None
        return create_attention_mask(N, offset=self.offset, **{"window_size": self.max_size, **asked})

    def put(self, keys: mx.array, values: mx.array, *, token_count: int) -> None:
        """Write the last of `token_count` tokens, [1, heads, tokens, size], to new pages."""
        # No token sees what the page holds before these. But it is read with a weight of 0, and memory that
        # was never written may hold NaN.
        unseen = (token_count - keys.shape[2]) % self.run.group.pool.shape.page_token_count
        before = [(0, 0), (0, 0), (unseen, 0), (0, 0)]
        keys, values = mx.pad(keys, before), mx.pad(values, before)
        count = keys.shape[2]
        run = self.run
        if not run.pages:  # the first of the layers that share these pages allocates them
            run.skip(token_count - count)
            run.make_room(token_count)
        places = places_of([run], [token_count - count], [count])
        group = run.group
        group.attention.write(
            group.pool, keys.swapaxes(0, 2), values.swapaxes(0, 2), places, layer=self.layer
        )


class _PagedEntry(CacheClass):
    """Base of both entries. The row's table counts its tokens, so taking tokens back changes no cache."""

    __slots__ = ()

    def tokens(self, cache: Cache) -> TokenArrays:
        return cast(TokenArrays, cache.tokens())

    def rewind(self, cache: Cache, count: int) -> None:
        pass

    def mark(self, cache: Cache) -> Undo:
        return lambda: None


class PagedKv(_PagedEntry, PlainKv):
    """Entry of PagedCache."""

    __slots__ = ()

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        raise AssertionError("Pages are put into a table, not rebuilt")


class PagedWindowKv(_PagedEntry, RotatingKv):
    """Entry of PagedWindowCache, which keeps up to a page of tokens more than its window."""

    __slots__ = ()

    def of_other(self, cache: Cache) -> Cache | None:
        return None

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.put(arrays["k"], arrays["v"], token_count=token_count)
        return empty

    @property
    def is_cut_before_guesses(self) -> bool:
        return True


PagedCache.cache_class = PagedKv(PagedCache)
PagedWindowCache.cache_class = PagedWindowKv(PagedWindowCache)


@dataclasses.dataclass(frozen=True, slots=True)
class Paging:
    """The groups of a model's layers whose KV is in pages."""

    groups: tuple[PageGroup, ...]

    def caches(self, fresh: Sequence[Cache]) -> list[Cache]:
        """Return a new row's caches: `fresh`, but paged ones, on a new table, where KV is in pages."""
        table = PageTable(self.groups)
        caches = list(fresh)
        for run in table.runs:
            kind = PagedCache if run.group.window is None else PagedWindowCache
            for index, layer in run.group.layers.items():
                caches[index] = kind(table, run, layer)
        return caches

    @property
    def unlimited(self) -> PageGroup | None:
        """The layers of unlimited context."""
        return next((group for group in self.groups if group.window is None), None)

    @property
    def bounded_bytes(self) -> int:
        """Size of the pools that were allocated at once; 0 if they grow."""
        pools = [group.pool for group in self.groups if group.pool.is_bounded]
        return sum(pool.page_count * pool.shape.page_bytes for pool in pools)

    @property
    def free_bytes(self) -> int:
        return sum(group.pool.free_bytes for group in self.groups)


def table_of(caches: Sequence[Cache]) -> PageTable:
    """Return the page table of a row's caches; one that only counts if none of them is paged."""
    return next((cache.table for cache in caches if isinstance(cache, PagedCache)), PageTable())
