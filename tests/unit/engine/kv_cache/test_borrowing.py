"""Caches whose first tokens are somebody else's: what a KVCache holds, and nothing of others' written."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.kv_cache import rewind
from icehouse_server.engine.kv_cache.borrowing import BorrowingCache, Segments
from icehouse_server.engine.kv_cache.cache_classes import class_of
from icehouse_server.engine.kv_cache.layout import CacheLayout
from icehouse_server.engine.kv_cache.restore import LoadedKv, RestoreSource
from mlx_lm.models.cache import KVCache

from tests.unit.engine.kv_cache.runs import (
    BLOCK,
    CHUNK,
    Recording,
    feed,
    greedy,
    made_target,
    model_of,
    prompt,
    same_bits,
    uninterrupted,
)


def tokens(start: int, count: int) -> tuple[mx.array, mx.array]:
    """Return keys and values, [1, 2, count, 3], each number its position."""
    keys = mx.broadcast_to(mx.arange(start, start + count, dtype=mx.float32)[:, None], (1, 2, count, 3))
    return mx.contiguous(keys), mx.contiguous(-keys)


def borrowing() -> BorrowingCache:
    """Return a cache of 12 tokens, lent in pieces of 5 and 7."""
    return BorrowingCache([tokens(0, 5), tokens(5, 7)], KVCache())


def joined(array: Any) -> mx.array:
    return mx.concatenate(list(array.pieces), axis=2) if isinstance(array, Segments) else array


def test_what_is_appended_comes_behind_what_is_lent() -> None:
    cache = borrowing()
    for start, count in ((12, 3), (15, 1), (16, 300)):
        keys, values = cache.append(*tokens(start, count))
        assert isinstance(keys, Segments) and isinstance(values, Segments)
        assert keys.shape == (1, 2, start + count, 3) and keys.dtype == mx.float32
        assert mx.array_equal(joined(keys), tokens(0, start + count)[0])
        assert mx.array_equal(joined(values), tokens(0, start + count)[1])
        assert cache.offset == start + count


@pytest.mark.parametrize("own_count", [0, 4])
@pytest.mark.parametrize(
    "look",
    [
        lambda cache: (cache.keys[:, :, : cache.offset], cache.values[:, :, : cache.offset]),
        lambda cache: cache.keys_and_values(),
        lambda cache: cache.update_and_fetch(*tokens(cache.offset, 2)),
    ],
)
def test_who_knows_nothing_of_it_finds_a_cache_of_its_own(own_count: int, look: Any) -> None:
    lent = [tokens(0, 5), tokens(5, 7)]
    cache = BorrowingCache(lent, KVCache())
    if own_count:
        cache.append(*tokens(12, own_count))
    keys, values = look(cache)
    assert mx.array_equal(keys, tokens(0, cache.offset)[0])
    assert mx.array_equal(values, tokens(0, cache.offset)[1])
    assert cache.lent_token_count == 0
    cache.append(*tokens(cache.offset, 3))
    assert mx.array_equal(cache.keys[:, :, : cache.offset], tokens(0, cache.offset)[0])
    assert mx.array_equal(lent[1][0], tokens(5, 7)[0]), "what was lent was written to"


def test_who_gives_it_arrays_has_them_in_the_place_of_all_it_held() -> None:
    cache = borrowing()
    cache.append(*tokens(12, 2))
    cache.keys = cache.values = None
    cache.offset = 0
    assert cache.empty() and cache.lent_token_count == 0
    cache.keys, cache.values = tokens(0, 20)
    cache.offset = 14
    keys, values = cache.append(*tokens(14, 1))
    assert mx.array_equal(keys, tokens(0, 15)[0]) and mx.array_equal(values, tokens(0, 15)[1])


def test_tokens_are_taken_back_and_room_is_made() -> None:
    cache = borrowing()
    assert cache.room_token_count == 12
    cache.make_room(100)
    cache.append(*tokens(12, 6))
    assert cache.room_token_count == 100
    rewind.rewind([cache], 4)
    assert cache.offset == 14
    keys, _ = cache.append(*tokens(14, 2))
    assert mx.array_equal(joined(keys), tokens(0, 16)[0])


@pytest.mark.parametrize("own_count", [0, 3])
def test_a_fork_goes_on_by_itself(own_count: int) -> None:
    cache = borrowing()
    if own_count:
        cache.append(*tokens(12, own_count))
    (fork,) = rewind.forked([cache])
    fork.append(*tokens(fork.offset, 5))
    assert (cache.offset, fork.offset) == (12 + own_count, 17 + own_count)
    other = copy.copy(cache)
    assert mx.array_equal(other.append(*tokens(12 + own_count, 1))[0].pieces[0], tokens(0, 5)[0])


def test_blocks_are_cut_across_what_is_lent_and_what_is_its_own() -> None:
    cache = borrowing()
    cache.append(*tokens(12, 9))
    held = class_of(cache).held(cache)
    assert held.end == 21
    for start, stop in ((0, 5), (0, 21), (3, 8), (6, 12), (11, 13), (12, 21), (20, 21)):
        (_, keys), (_, values) = held.cut(start, stop)
        assert mx.array_equal(keys, tokens(start, stop - start)[0])
        assert mx.array_equal(values, tokens(start, stop - start)[1])
    assert class_of(borrowing()).held(borrowing()).cut(2, 12)[0][1].shape == (1, 2, 10, 3)


def lent(recording: Recording, source: RestoreSource, token_count: int) -> list[Any]:
    restoring = recording.layout.begin_restore(
        source,
        token_count=token_count,
        capacity_token_count=token_count,
        make_caches=recording.make_caches,
        lent_places=[place for place, cache in enumerate(recording.make_caches()) if type(cache) is KVCache],
    )
    while restoring.step():
        pass
    return restoring.caches


@pytest.mark.parametrize(
    ("architecture", "token_count"),
    [("llama", 4 * BLOCK), ("llama", 3 * BLOCK - 5), ("llama", 1), ("gemma3_text", 4 * BLOCK), ("lfm2", 64)],
)
def test_a_restore_copies_nothing_and_holds_the_same_bits(architecture: str, token_count: int) -> None:
    recording = Recording(model_of(architecture), prompt(4 * BLOCK))
    source = RestoreSource(recording.blocks(stop=token_count))
    first, second = (lent(recording, source, token_count) for _ in range(2))
    borrowed = [(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, BorrowingCache)]
    assert borrowed
    for a, b in borrowed:
        for (keys, values), (other_keys, other_values) in zip(a._lent, b._lent, strict=True):
            same = token_count % BLOCK == 0 or keys.shape[2] == BLOCK
            assert (np.asarray(keys).ctypes.data == np.asarray(other_keys).ctypes.data) or not same
            assert values.shape == other_values.shape
    expected = uninterrupted(recording.model, recording.tokens[:token_count])
    assert greedy(recording.model, first, 11, 8)[0] == greedy(recording.model, expected, 11, 8)[0]
    layout = CacheLayout.of(recording.make_caches(), block_token_count=BLOCK)
    cut = dict(layout.cut_kv(second, start=0, stop=token_count).arrays)
    for name, array in layout.cut_kv(
        uninterrupted(recording.model, recording.tokens[:token_count]), start=0, stop=token_count
    ).arrays:
        if token_count % CHUNK == 0:  # other chunks give other bits
            assert same_bits(cut[name], array)


@pytest.mark.parametrize("ram_block_count", [0, 1, 3])
def test_what_is_read_from_ssd_goes_on_behind_what_is_lent(ram_block_count: int) -> None:
    recording = Recording(model_of("llama"), prompt(4 * BLOCK))
    split, token_count = ram_block_count * BLOCK, 4 * BLOCK - 3
    region = dict(recording.layout.cut_kv(recording.caches, start=split, stop=4 * BLOCK).arrays)
    target = made_target(
        recording.layout.kv_shapes(recording.caches), capacity_token_count=4 * BLOCK - split + 9
    )
    for view in target.views():
        _, heads, rows, _ = view.shape
        into = np.frombuffer(view.data, dtype=np.float32).reshape(1, heads, rows, -1)
        into[:] = np.nan
        into[:, :, : 4 * BLOCK - split] = np.array(region[view.name])
    loaded = LoadedKv(target, split, 4 * BLOCK, first_token_index=split)
    source = RestoreSource(recording.blocks(stop=split) if split else (), loaded)
    caches = lent(recording, source, token_count)
    assert all(cache.lent_token_count == split for cache in caches)
    expected = uninterrupted(recording.model, recording.tokens)
    for cache in expected:
        cache.trim(3)
    assert [cache.offset for cache in caches] == [cache.offset for cache in expected]
    for chunk in (prompt(7), [11]):
        assert same_bits(feed(recording.model, caches, chunk), feed(recording.model, expected, chunk))
