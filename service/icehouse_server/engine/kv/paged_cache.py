"""Paged cache: one layer's cache of one row, whose keys and values lie in the page pool.

It stands where a row would have a plain cache of mlx-lm. Attention finds the pages by itself; who asks for
keys and values here has them copied out. Inference thread only.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import create_attention_mask

from icehouse_server.engine.attention.gather import gathered
from icehouse_server.engine.kv.table import PageTable
from icehouse_server.engine.kv_cache.held import Held


class PagedCache:
    """Does what is asked of a plain cache outside of a pass."""

    __slots__ = ("layer", "table")

    def __init__(self, table: PageTable, layer: int) -> None:
        """`layer` is counted within the pool."""
        self.table = table
        self.layer = layer

    @property
    def offset(self) -> int:
        return self.table.token_count

    @property
    def state(self) -> Any:
        """What tells that all was written."""
        assert self.table.pool is not None
        return self.table.pool.order

    @property
    def nbytes(self) -> int:
        pool = self.table.pool
        assert pool is not None
        return len(self.table.pages) * pool.shape.page_bytes // pool.shape.layer_count

    def empty(self) -> bool:
        return not self.offset

    def make_mask(self, N: int, **asked: Any) -> Any:
        """Return what a plain cache with as many tokens does."""
        return create_attention_mask(N, offset=self.offset, **asked)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise AssertionError("Keys and values of pages are written by attention, for all rows at once")

    def held(self) -> Held:
        """Return copies of all keys and values, [1, heads, tokens, size], lazily."""
        pool, count = self.table.pool, self.offset
        assert pool is not None
        if not count:
            return Held((), 0, 0, 0)
        numbers = np.array(self.table.numbers[: pool.pages_for(count)], np.int32)
        keys, values = gathered(pool, numbers, layer=self.layer, token_count=count)
        return Held((("k", keys), ("v", values)), 0, count, count)
