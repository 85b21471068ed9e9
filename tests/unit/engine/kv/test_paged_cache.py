"""A row whose window was restored: what its first page has before that nobody sees, and it is a number."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.port import PoolShape
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv.paged_cache import PagedWindowCache, Paging
from icehouse_server.engine.kv.pool import PagePool, PassClock
from mlx_lm.models.cache import RotatingKVCache

WINDOW, PAGE = 24, 16


@pytest.mark.parametrize("token_count", [WINDOW, 107, 112])
def test_what_a_page_has_before_a_restored_window_is_a_number(token_count: int) -> None:
    """Attention reads it with a weight of 0, and no product of what is no number is 0."""
    shape = PoolShape(layer_count=1, kv_head_count=2, page_token_count=PAGE, head_size=8, dtype=mx.float32)
    pool = PagePool(shape, passes=PassClock())
    attention = GatherAttention()
    attention.fill_pages(pool, mx.full(pool.array.shape, mx.nan), np.arange(pool.page_count, dtype=np.int32))
    group = PageGroup(pool, attention, {0: 0}, WINDOW)
    (cache,) = Paging((group,)).caches([RotatingKVCache(WINDOW)])
    assert isinstance(cache, PagedWindowCache)
    cache.put(mx.ones((1, 2, WINDOW, 8)), mx.ones((1, 2, WINDOW, 8)), token_count=token_count)
    cache.table.token_count = token_count
    for _, array in cache.tokens().tensors:
        assert bool(mx.isfinite(array).all())
        assert bool((array[:, :, -WINDOW:] == 1).all())
