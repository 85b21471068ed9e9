"""Token arrays: whatever a cache went through, each of them is found where its class says it is.

K/V here are no model's: every slot holds its own sequence tag and position, so that a cut can be
read. Hypothesis drives caches through any order of prefill and decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.engine.kv_cache.cache_classes import class_of
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

WINDOW = 8
TAG = 1000


def _tokens(tags: Sequence[int], starts: Sequence[int], count: int) -> mx.array:
    """Return [rows, 2, count, 3], every element tag * TAG + position."""
    rows = [tag * TAG + np.arange(start, start + count) for tag, start in zip(tags, starts, strict=True)]
    values = np.stack(rows).astype(np.float32)[:, None, :, None]
    return mx.array(np.broadcast_to(values, (len(rows), 2, count, 3)))


def _check(cache: Any, *, tag: int, length: int, at_least: int) -> None:
    """Cut all tokens and every proper piece at their ends; compare with what was written."""
    found = class_of(cache).tokens(cache)
    assert found.end == length and found.count >= min(at_least, length)
    oldest = found.end - found.count
    for start, stop in {
        (oldest, length),
        (oldest, oldest + 1),
        (length - 1, length),
        ((oldest + length) // 2, length),
    }:
        if start >= stop:
            continue
        wanted = _tokens([tag], [start], stop - start)
        for suffix, array in found.cut(start, stop):
            sign = -1 if suffix == "v" else 1
            assert mx.array_equal(array, sign * wanted).item(), (suffix, start, stop)


def _feed(cache: Any, tags: Sequence[int], lengths: list[int], count: int) -> None:
    keys = _tokens(tags, lengths, count)
    cache.update_and_fetch(keys, -keys)
    for row in range(len(lengths)):
        lengths[row] += count


def _new(kind: str) -> Any:
    return {
        "kv": KVCache,
        "rotating": lambda: RotatingKVCache(WINDOW),
        "chunked": lambda: ChunkedKVCache(WINDOW),
    }[kind]()


@pytest.mark.parametrize("kind", ["kv", "rotating", "chunked"])
@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.sampled_from([1, 1, 1, 2, 3, 7, 8, 9, 20]), min_size=1, max_size=12))
def test_single_caches(kind: str, counts: list[int]) -> None:
    cache, lengths = _new(kind), [0]
    for count in counts:
        if kind == "chunked":
            cache.maybe_trim_front()
        _feed(cache, [1], lengths, count)
        at_least = lengths[0] if kind == "kv" else WINDOW
        _check(cache, tag=1, length=lengths[0], at_least=at_least)
