"""Cache classes: a row for each entry, and what every entry must do, shown on caches that no model filled."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import (
    CACHE_CLASSES,
    class_of,
    leaves,
    mark,
    quantize_caches,
    step_token_count,
)
from icehouse_server.engine.kv_cache.cache_layout import CacheLayout
from icehouse_server.engine.kv_cache.regions import from_host, to_host
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tests.unit.engine.kv_cache.runs import block_of, rebuilt, same_bits

WINDOW = 8
BLOCK = 4


def feed_kv(cache: Any, start: int, count: int) -> list[mx.array]:
    """Update as a model's layer does; return what it would attend to."""
    if hasattr(cache, "maybe_trim_front"):
        cache.maybe_trim_front()
    keys = mx.random.normal((1, 2, 64, 32), key=mx.random.key(7))[:, :, start : start + count]
    seen: Any = cache.update_and_fetch(keys, 2 * keys)
    flat = [seen] if isinstance(seen, mx.array) else list(seen)
    arrays = [array for part in flat for array in (part if isinstance(part, tuple) else (part,))]
    mx.eval(arrays)
    return arrays


def feed_slots(cache: Any, start: int, count: int) -> list[mx.array]:
    """Move a state of two slots on."""
    for slot, shape in enumerate(((1, 3, 4), (1, 5))):
        state = mx.zeros(shape) if cache[slot] is None else cache[slot]
        for token in range(start, start + count):
            state = state * 0.5 + token
        cache[slot] = state
    mx.eval(cache.cache)
    return list(cache.cache)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One entry: how its caches are made and fed, and what is to be true of it."""

    make: Callable[[], Any]
    kind: RegionKind
    rewinds: bool
    is_plain: bool = False
    quantized: type | None = None
    step_token_count: int = 256
    feed: Callable[[Any, int, int], list[mx.array]] = feed_kv


ROWS: dict[type, Row] = {
    KVCache: Row(KVCache, RegionKind.KV, rewinds=True, is_plain=True, quantized=QuantizedKVCache),
    QuantizedKVCache: Row(lambda: QuantizedKVCache(group_size=32, bits=8), RegionKind.KV, rewinds=True),
    ChunkedKVCache: Row(lambda: ChunkedKVCache(WINDOW), RegionKind.WINDOW, rewinds=True),
    RotatingKVCache: Row(lambda: RotatingKVCache(WINDOW), RegionKind.WINDOW, rewinds=True),
    ArraysCache: Row(lambda: ArraysCache(2), RegionKind.CHECKPOINT, rewinds=False, feed=feed_slots),
}


def run(row: Row, cache: Any, counts: Sequence[int], *, start: int = 0) -> list[mx.array]:
    seen: list[mx.array] = []
    for count in counts:
        seen = row.feed(cache, start, count)
        start += count
    return seen


def alike(left: Sequence[mx.array], right: Sequence[mx.array]) -> bool:
    return len(left) == len(right) and all(map(same_bits, left, right))


def in_context(row: Row, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return what the next token attends to: a ring's order is its own, and its older tokens are masked."""
    if row.kind is not RegionKind.WINDOW:
        return list(arrays)
    return [mx.sort(array[:, :, -WINDOW:], axis=2) for array in arrays]


each = pytest.mark.parametrize("row", [pytest.param(row, id=kind.__name__) for kind, row in ROWS.items()])


def test_every_entry_has_its_row() -> None:
    assert set(ROWS) == set(CACHE_CLASSES)
    assert all(type(row.make()) is kind for kind, row in ROWS.items())


def test_every_cache_class_of_mlx_lm_is_known() -> None:
    """What stands here was looked at: a class that a new mlx-lm brings fails this."""
    base = upstream._BaseCache
    found = {kind for _, kind in inspect.getmembers(upstream, inspect.isclass) if issubclass(kind, base)}
    # The base; a list of caches; one that no model makes; and what several sequences' caches are merged into,
    # which is not done here.
    others = {base, CacheList, upstream.ConcatenateKVCache}
    batches = {upstream.BatchKVCache, upstream.BatchRotatingKVCache}
    assert found - others - batches <= set(CACHE_CLASSES)


@each
def test_what_an_entry_says(row: Row) -> None:
    cache = row.make()
    entry = class_of(cache)
    assert entry.kind is row.kind
    assert entry.window_token_count(cache) == (WINDOW if row.kind is RegionKind.WINDOW else 0)
    assert list(entry.suffixes) == sorted(entry.suffixes)
    assert entry.is_plain is row.is_plain
    assert entry.is_state is (row.kind is RegionKind.CHECKPOINT)
    assert entry.masks_chunks is isinstance(cache, ChunkedKVCache)
    assert class_of(cache).can_rewind(cache) is row.rewinds
    (chosen,) = quantize_caches([cache], bits=8, group_size=32)
    assert type(chosen) is (row.quantized or type(cache))
    assert step_token_count([cache]) == row.step_token_count


@pytest.mark.parametrize("fed", [(4,), (4, 4, 4), (4, 1, 1, 1, 1, 4), (4, 8, 4, 1, 1, 1, 1)])
@each
def test_a_rebuilt_cache_goes_on_as_the_first(row: Row, fed: tuple[int, ...]) -> None:
    cache = row.make()
    layout = CacheLayout.of([cache], block_token_count=BLOCK)
    blocks: list[PlacedBlock] = []
    total, start = sum(fed), 0
    for count in fed:
        row.feed(cache, start, count)
        start += count
        for low in range(sum(b.token_count for b in blocks), start - BLOCK + 1, BLOCK):
            blocks.append(
                block_of(
                    low,
                    BLOCK,
                    kv=from_host(
                        to_host(layout.cut_tokens(RegionKind.KV, [cache], start=low, stop=low + BLOCK))
                    ),
                    window=from_host(
                        to_host(layout.cut_tokens(RegionKind.WINDOW, [cache], start=low, stop=low + BLOCK))
                    ),
                    checkpoint=from_host(to_host(layout.cut_checkpoint([cache]))),
                )
            )
    (other,) = rebuilt(layout, blocks, [row.make()], token_count=total)
    assert type(other) is type(cache)
    start = total
    for count in (1, 3, 1, 1):
        warm, cold = row.feed(other, start, count), row.feed(cache, start, count)
        start += count
        assert alike(in_context(row, warm), in_context(row, cold))


@pytest.mark.parametrize("before", [(2,), (5, 1), (9,), (9, 1, 1, 1)])
@pytest.mark.parametrize(("fed", "taken"), [(2, 1), (4, 1), (4, 3)])
@each
def test_what_is_taken_back_was_never_there(row: Row, before: tuple[int, ...], fed: int, taken: int) -> None:
    cache, other = row.make(), row.make()
    if not class_of(cache).can_rewind(cache):
        with pytest.raises(AssertionError, match="takes no tokens back"):
            class_of(cache).rewind(cache, taken)
        return
    start = sum(before)
    run(row, cache, (*before, fed))
    run(row, other, (*before, fed - taken))
    class_of(cache).rewind(cache, taken)
    start += fed - taken
    for count in (1, 3, 1):
        left, right = row.feed(cache, start, count), row.feed(other, start, count)
        start += count
        assert alike(in_context(row, left), in_context(row, right))


@pytest.mark.parametrize("before", [(2,), (5, 1), (9,), (9, 1, 1, 1)])
@each
def test_a_mark_undoes_every_update_since(row: Row, before: tuple[int, ...]) -> None:
    cache, other = row.make(), row.make()
    start = sum(before)
    run(row, cache, before)
    run(row, other, before)
    undos = mark([CacheList(cache)])
    run(row, cache, (1, 3, 1, 1, 1, 1, 1, 1, 1), start=start + 5)
    for undo in undos:
        undo()
    for count in (1, 3, 1):
        assert alike(row.feed(cache, start, count), row.feed(other, start, count))
        start += count


def test_a_subclass_is_another_class() -> None:
    class Subclassed(KVCache):
        pass

    entry = class_of(Subclassed())
    assert entry.kind is RegionKind.CHECKPOINT and not entry.can_rewind(Subclassed())
    assert entry == class_of(Subclassed()) != class_of(KVCache())


def test_lists_hold_leaves() -> None:
    caches = [CacheList(KVCache(), CacheList(ArraysCache(1), KVCache())), RotatingKVCache(WINDOW)]
    assert [type(leaf) for leaf in leaves(caches)] == [KVCache, ArraysCache, KVCache, RotatingKVCache]
    chosen = quantize_caches(caches, bits=8, group_size=32)
    kinds = [type(leaf) for leaf in leaves(chosen)]
    assert kinds == [QuantizedKVCache, ArraysCache, QuantizedKVCache, RotatingKVCache]
