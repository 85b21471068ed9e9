"""Held tokens: whatever a cache went through, each of them is found where its class says it is.

K/V here are no model's: every slot holds its own sequence tag and position, so that a cut can be
read. Hypothesis drives caches and batches through any order of prefill, decode, join and leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.engine.kv_cache.cache_classes import CACHE_CLASSES
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, ChunkedKVCache, KVCache, RotatingKVCache

WINDOW = 8
TAG = 1000
CLASS_OF = {
    **CACHE_CLASSES,
    BatchKVCache: CACHE_CLASSES[KVCache],
    BatchRotatingKVCache: CACHE_CLASSES[RotatingKVCache],
}


def _tokens(tags: Sequence[int], starts: Sequence[int], count: int) -> mx.array:
    """Return [rows, 2, count, 3], every element tag * TAG + position."""
    rows = [tag * TAG + np.arange(start, start + count) for tag, start in zip(tags, starts, strict=True)]
    values = np.stack(rows).astype(np.float32)[:, None, :, None]
    return mx.array(np.broadcast_to(values, (len(rows), 2, count, 3)))


def _check(cache: Any, *, row: int, tag: int, length: int, at_least: int) -> None:
    """Cut all held tokens and every proper piece at their ends; compare with what was written."""
    found = CLASS_OF[type(cache)].held_row(cache, row=row)
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
        _check(cache, row=0, tag=1, length=lengths[0], at_least=at_least)


Row = tuple[int, int]
"""Prefilled token count, then tokens decoded alone before joining."""
rows_strategy = st.lists(st.tuples(st.integers(1, 21), st.integers(0, 3)), min_size=1, max_size=3)
steps_strategy = st.lists(
    st.one_of(st.integers(1, 10), st.just("leave"), rows_strategy), min_size=1, max_size=6
)


@pytest.mark.parametrize("kind", ["kv", "rotating"])
@settings(max_examples=80, deadline=None)
@given(first=rows_strategy, steps=steps_strategy)
def test_rows_of_batches(kind: str, first: list[Row], steps: list[Any]) -> None:
    tags, lengths = list(range(1, len(first) + 1)), [sum(row) for row in first]
    batch = _merged(kind, first, tags)
    next_tag = len(first) + 1
    for step in steps:
        if isinstance(step, int):
            for _ in range(step):
                _feed(batch, tags, lengths, 1)
        elif step == "leave":
            if len(tags) == 1:
                continue
            keep = list(range(1, len(tags)))
            batch.filter(keep)
            tags, lengths = tags[1:], lengths[1:]
        else:
            new_tags = list(range(next_tag, next_tag + len(step)))
            next_tag += len(step)
            batch.extend(_merged(kind, step, new_tags))
            tags, lengths = tags + new_tags, lengths + [sum(row) for row in step]
        for row, (tag, length) in enumerate(zip(tags, lengths, strict=True)):
            at_least = length if kind == "kv" else WINDOW
            _check(batch, row=row, tag=tag, length=length, at_least=at_least)
            _check(batch.extract(row), row=0, tag=tag, length=length, at_least=at_least)


def _merged(kind: str, rows: Sequence[Row], tags: Sequence[int]) -> Any:
    caches = []
    for (prefilled, decoded), tag in zip(rows, tags, strict=True):
        cache, lengths = _new(kind), [0]
        _feed(cache, [tag], lengths, prefilled)
        for _ in range(decoded):
            _feed(cache, [tag], lengths, 1)
        caches.append(cache)
    return (BatchKVCache if kind == "kv" else BatchRotatingKVCache).merge(caches)
