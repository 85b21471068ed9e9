"""The contract with mlx-lm's non-public corners: this fails when they move."""

from __future__ import annotations

import inspect

import mlx.core as mx
import pytest
from mlx_lm.generate import _extend_cache, _merge_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from service.engine import upstream
from tests.models import ARCHITECTURES, build


def test_the_private_functions_have_the_shape_we_call() -> None:
    assert list(inspect.signature(_merge_caches).parameters) == ["caches"]
    assert list(inspect.signature(_extend_cache).parameters) == ["cache_a", "cache_b"]


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (KVCache(), True),
        (RotatingKVCache(max_size=8), True),
        (ArraysCache(2), True),
        (CacheList(KVCache(), ArraysCache(2)), True),
        (QuantizedKVCache(), False),
        (ChunkedKVCache(8), False),
        (CacheList(KVCache(), ChunkedKVCache(8)), False),
    ],
)
def test_which_classes_batch(cache, expected: bool) -> None:
    assert upstream.can_batch([cache]) is expected


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rows_join_leave_and_come_out_again(architecture: str) -> None:
    model = build(architecture)
    rows = []
    for length in (3, 7):
        caches = upstream.make_caches(model)
        mx.eval(model(mx.arange(5, 5 + length)[None], cache=caches), upstream.cache_states(caches))
        rows.append(caches)
    if not upstream.can_batch(rows[0]):
        with pytest.raises(ValueError, match="batching"):
            upstream.merge_caches(rows)
        return
    batch = upstream.extend_caches(upstream.merge_caches(rows[:1]), upstream.merge_caches(rows[1:]))
    mx.eval(model(mx.array([[9], [9]]), cache=batch))
    for cache in batch:
        cache.filter([1])
    out = [cache.extract(0) for cache in batch]
    alone = model(mx.array([[9]]), cache=rows[1])
    mx.eval(alone, upstream.cache_states(out))
    again = model(mx.array([[11]]), cache=out)
    expected = model(mx.array([[11]]), cache=rows[1])
    assert mx.allclose(again, expected, atol=1e-4).item()
