"""Paged caches: one layer's cache of one row, whose keys and values lie in the page pool.

They stand where a row would have a cache of mlx-lm: a plain one, or one with a sliding window. Attention
finds the pages by itself; who asks for keys and values here has them copied out. Inference thread only.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from icehouse_server.engine.kv.places import places_of_one
from icehouse_server.engine.kv.table import PageRun, PageTable
from icehouse_server.engine.kv_cache.cache_classes import (
    Arrays,
    Cache,
    CacheClass,
    PlainKv,
    RotatingKv,
    Undo,
)
from icehouse_server.engine.kv_cache.held import Held


class PagedCache:
    """Does what is asked of a plain cache outside of a pass."""

    cache_class: ClassVar[CacheClass]
    __slots__ = ("layer", "run", "table")

    def __init__(self, table: PageTable, run: PageRun, layer: int) -> None:
        """`layer` is counted within the run's pool."""
        self.table = table
        self.run = run
        self.layer = layer

    @property
    def offset(self) -> int:
        return self.table.token_count

    @property
    def state(self) -> Any:
        """What tells that all was written."""
        return self.run.group.pool.order

    @property
    def nbytes(self) -> int:
        shape = self.run.group.pool.shape
        held_count = len(self.run.pages) - self.run.numbers.count(-1)
        return held_count * shape.page_bytes // shape.layer_count

    def empty(self) -> bool:
        return not self.offset

    def make_mask(self, N: int, **asked: Any) -> Any:
        """Return what a plain cache with as many tokens does."""
        return create_attention_mask(N, offset=self.offset, **asked)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise AssertionError("Keys and values of pages are written by attention, for all rows at once")

    def held(self) -> Held:
        """Return copies of the keys and values, [1, heads, tokens, size], lazily."""
        group, count = self.run.group, self.offset
        if not count:
            return Held((), 0, 0, 0)
        begin = self.run.first_token_index
        places = places_of_one(self.run, start=count - 1, stop=count)
        keys, values = group.attention.gather_row(
            group.pool, places, row=0, layer=self.layer, first_token=begin, key_count=count - begin
        )
        return Held((("k", keys), ("v", values)), 0, count - begin, count)


class PagedWindowCache(PagedCache):
    """The same of a cache with a sliding window."""

    __slots__ = ()
    keep = 0

    @property
    def max_size(self) -> int:
        window = self.run.group.window
        assert window is not None
        return window

    def make_mask(self, N: int, **asked: Any) -> Any:
        """Return None: attention over pages knows the window."""
        if not asked.get("return_array"):
            return None
        return create_attention_mask(N, offset=self.offset, **{"window_size": self.max_size, **asked})

    def put(self, keys: mx.array, values: mx.array, *, token_count: int) -> None:
        """Have the last of so many tokens, [1, heads, tokens, size], in pages of its own."""
        kept = keys.shape[2]
        run = self.run
        if not run.pages:  # by the first of the layers that share them
            run.skip(token_count - kept)
            run.make_room(token_count)
        places = places_of_one(run, start=token_count - kept, stop=token_count)
        group = run.group
        group.attention.write(
            group.pool, keys.swapaxes(0, 2), values.swapaxes(0, 2), places, layer=self.layer
        )


class PagedKv(PlainKv):
    """PagedCache, which is this server's: its keys and values lie in the page pool. The row's table counts
    its tokens, for all layers."""

    __slots__ = ()

    def held(self, cache: Cache) -> Held:
        return cast(Held, cache.held())

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        raise AssertionError("Pages are put into a table, not rebuilt")

    def rewind(self, cache: Cache, count: int) -> None:
        """The row's table counts fewer tokens."""

    def mark(self, cache: Cache) -> Undo:
        return lambda: None


class PagedWindowKv(RotatingKv):
    """PagedWindowCache: the same with keys and values in the page pool, and a page more of them."""

    __slots__ = ()

    def of_other(self, cache: Cache) -> Cache | None:
        return None

    def held(self, cache: Cache) -> Held:
        return cast(Held, cache.held())

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.put(arrays["k"], arrays["v"], token_count=token_count)
        return empty

    def rewind(self, cache: Cache, count: int) -> None:
        """The row's table counts fewer tokens."""

    def mark(self, cache: Cache) -> Undo:
        return lambda: None

    @property
    def is_cut_before_guesses(self) -> bool:
        return True


PagedCache.cache_class = PagedKv(PagedCache)
PagedWindowCache.cache_class = PagedWindowKv(PagedWindowCache)
