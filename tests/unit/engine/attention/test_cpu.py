"""Attention over pages on a CPU, against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.build_hooks import FIRST_WAIT
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.port import AttentionCall, PoolShape, TokenPlaces

from tests.unit.engine.attention.pools import (
    RandomPool,
    attended,
    ints,
    keys_and_values,
    normal,
    numbers,
    places_in,
    tables_for,
)

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
LAYER = 1
"""Of three: what is below and above it must stay as it is."""
PAGE_COUNT = 100

pytestmark = pytest.mark.skipif(not ON_CPU, reason="an array is not host memory there")


@dataclasses.dataclass(frozen=True)
class Geometry:
    group: int = 2
    kv_head_count: int = 2
    head_size: int = 32
    page_token_count: int = 64
    dtype: mx.Dtype = mx.float32

    @property
    def shape(self) -> PoolShape:
        return PoolShape(3, self.kv_head_count, self.head_size, self.page_token_count, self.dtype)

    @property
    def tolerance(self) -> float:
        """Of results that are about one in size."""
        return 1e-5 if self.dtype == mx.float32 else 2e-2


PLAIN = Geometry()
GEOMETRIES = [
    PLAIN,
    Geometry(group=1, kv_head_count=4),
    Geometry(group=8, kv_head_count=1, page_token_count=16),
    Geometry(dtype=mx.float16),
    Geometry(dtype=mx.bfloat16),
]

Rows = Sequence[tuple[int, int]]
"""Of each row: how many tokens it holds, and how many it brings."""

PASSES: dict[str, Rows] = {
    "one short row": [(30, 1)],
    "a row of nothing": [(0, 1)],
    "few short rows": [(30, 1), (63, 1), (64, 1), (65, 1)],
    "three short rows": [(63, 1), (64, 1), (9, 1)],
    "one long row": [(2200, 1)],
    "many rows": [(number * 7, 1) for number in range(1, 30)],
    "rows of very different lengths": [(5, 1), (1500, 1), (8, 1), (700, 1), (300, 1)],
    "guesses": [(1100, 4), (40, 1), (62, 5), (700, 8)],
    "a prompt": [(0, 200)],
    "a long prompt": [(0, 300)],
    "chunks behind others": [(300, 40), (500, 270)],
    "everything": [(900, 1), (63, 2), (20, 1), (128, 64), (0, 9), (200, 70)],
}


def pass_of(
    geometry: Geometry, rows: Rows
) -> tuple[RandomPool, TokenPlaces, list[list[int]], list[tuple[int, int]]]:
    """Return a pool, and rows in it without the tokens that they bring."""
    pool = RandomPool.of(geometry.shape, page_count=PAGE_COUNT * 64 // geometry.page_token_count)
    tables = tables_for(
        [held + brought for held, brought in rows],
        page_token_count=geometry.page_token_count,
        page_count=pool.array.shape[0],
    )
    tokens = [(row, held + n) for row, (held, brought) in enumerate(rows) for n in range(brought)]
    return pool, places_in(tables, tokens), tables, tokens


def brought(geometry: Geometry, token_count: int, *, seed: int = 11) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values."""
    heads = geometry.kv_head_count * geometry.group
    counts = (heads, geometry.kv_head_count, geometry.kv_head_count)
    queries, keys, values = (
        normal(key, token_count, count, 1, geometry.head_size, dtype=geometry.dtype)
        for key, count in enumerate(counts, seed)
    )
    return queries, keys, values


@pytest.mark.parametrize("window", [None, 100], ids=["unlimited", "window"])
@pytest.mark.parametrize(
    ("geometry", "rows"),
    [
        *(pytest.param(PLAIN, rows, id=name) for name, rows in PASSES.items()),
        *(pytest.param(each, PASSES["everything"], id=str(each)) for each in GEOMETRIES[1:]),
    ],
)
def test_tokens_see_their_rows_and_their_own(geometry: Geometry, rows: Rows, window: int | None) -> None:
    attention = CpuAttention()
    pool, places, _, tokens = pass_of(geometry, rows)
    queries, keys, values = brought(geometry, len(tokens))
    array, wanted_pool = pool.array, numbers(pool.array)
    found = attention.attend(
        pool, queries, places, AttentionCall(layer=LAYER, scale=0.2, window=window), (keys, values)
    )
    assert found.shape == queries.shape and found.dtype == geometry.dtype
    mx.eval(found)
    held = numbers(attention.read_pages(pool, ints(range(pool.array.shape[0]))))
    size = geometry.page_token_count
    at = places.positions
    pages = places.pages[places.page_starts[places.rows] + at // size]
    for kind, written in enumerate((keys, values)):
        wanted_pool[pages, LAYER, kind, :, at % size] = numbers(written)[:, :, 0]
    assert pool.array is array
    assert np.array_equal(held, wanted_pool)
    wanted = attended(pool, queries, places, layer=LAYER, scale=0.2, window=window)
    assert np.abs(numbers(found) - wanted).max() < geometry.tolerance


@pytest.mark.parametrize("rows", [PASSES["many rows"], PASSES["everything"]], ids=["many rows", "everything"])
def test_sinks_take_weight(rows: Rows) -> None:
    attention = CpuAttention()
    pool, places, _, tokens = pass_of(PLAIN, rows)
    queries, keys, values = brought(PLAIN, len(tokens))
    sinks = normal(3, queries.shape[1])
    attention.write(pool, keys, values, places, layer=LAYER)
    found = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=0.2, sinks=sinks))
    attention.read_pages(pool, ints([0]))
    wanted = attended(pool, queries, places, layer=LAYER, scale=0.2, sinks=sinks)
    assert np.abs(numbers(found) - wanted).max() < PLAIN.tolerance


def test_rows_share_pages() -> None:
    attention = CpuAttention()
    pool = RandomPool.of(PLAIN.shape, page_count=60)
    common = list(range(20, 40))
    tables = [[*common, row] for row in range(3)] + [[5, 6, 7], [*common, 9]]
    tokens = [(0, 1300), (1, 1281), (2, 1340), (3, 150), (4, 1299)]
    places = places_in(tables, tokens)
    queries, keys, values = brought(PLAIN, len(tokens))
    found = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=0.2), (keys, values))
    wanted = attended(pool, queries, places, layer=LAYER, scale=0.2)
    assert np.abs(numbers(found) - wanted).max() < PLAIN.tolerance


@pytest.mark.parametrize("window", [None, 150])
def test_pages_side_by_side_give_the_very_numbers_of_pages_apart(window: int | None) -> None:
    """They are read at once; a row that was restored has its tokens in other pages than the one before it."""
    tokens = [(0, 900), (1, 1000), (2, 640)]
    queries, keys, values = brought(PLAIN, len(tokens))
    side_by_side = [list(range(16)), list(range(16, 32)), list(range(32, 43))]
    apart = tables_for([1024, 1024, 704], page_token_count=64, page_count=PAGE_COUNT)
    pool, other = (RandomPool.of(PLAIN.shape, page_count=PAGE_COUNT) for _ in range(2))
    content = np.array(pool.array)
    for here, there in zip(side_by_side, apart, strict=True):
        content[there] = np.array(pool.array)[here]
    other.array = mx.array(content)
    found = []
    for each, tables in ((pool, side_by_side), (other, apart)):
        attention, places = CpuAttention(), places_in(tables, tokens)
        output = attention.attend(
            each, queries, places, AttentionCall(layer=LAYER, scale=0.2, window=window), (keys, values)
        )
        found.append(numbers(output))
        attention.settle(each)
    assert np.array_equal(*found)
    wanted = attended(pool, queries, places_in(side_by_side, tokens), layer=LAYER, scale=0.2, window=window)
    assert np.abs(found[0] - wanted).max() < PLAIN.tolerance


def test_passes_that_are_not_waited_for_see_each_other() -> None:
    """A few short ones, then one whose scores are waited for."""
    attention = CpuAttention()
    pool = RandomPool.of(PLAIN.shape, page_count=40)
    wanted_pool = RandomPool.of(PLAIN.shape, page_count=40)
    tables = tables_for([200, 1400], page_token_count=64, page_count=40)
    found, wanted = [], []
    for step in range(4):
        tokens = [(0, 100 + step), *([(1, 1300 + step)] if step == 3 else [])]
        places = places_in(tables, tokens)
        queries, keys, values = brought(PLAIN, len(tokens), seed=40 + step)
        for layer in range(3):
            found.append(
                attention.attend(pool, queries, places, AttentionCall(layer=layer, scale=0.2), (keys, values))
            )
            held = np.array(wanted_pool.array)
            for kind, written in enumerate((keys, values)):
                for token, (row, position) in enumerate(tokens):
                    held[tables[row][position // 64], layer, kind, :, position % 64] = numbers(written)[
                        token, :, 0
                    ]
            wanted_pool.array = mx.array(held)
            wanted.append(attended(wanted_pool, queries, places, layer=layer, scale=0.2))
    for mine, right in zip(found, wanted, strict=True):
        assert np.abs(numbers(mine) - right).max() < PLAIN.tolerance
    assert np.array_equal(numbers(attention.read_pages(pool, ints(range(40)))), numbers(wanted_pool.array))


def test_a_later_call_of_a_layer_sees_what_the_first_one_wrote() -> None:
    """As of layers that share KV; whether it is in the pool by then or not."""
    for rows in (PASSES["three short rows"], PASSES["many rows"], PASSES["everything"]):
        attention = CpuAttention()
        pool, places, _, tokens = pass_of(PLAIN, rows)
        queries, keys, values = brought(PLAIN, len(tokens))
        first = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=0.2), (keys, values))
        other = attention.attend(pool, queries * 2, places, AttentionCall(layer=LAYER, scale=0.1))
        assert np.abs(numbers(first) - numbers(other)).max() < PLAIN.tolerance


@pytest.mark.parametrize(("rows", "count"), [("three short rows", 0), ("many rows", 1), ("everything", 1)])
def test_what_comes_before_the_first_wait_comes_once(rows: str, count: int) -> None:
    attention = CpuAttention()
    pool, places, _, tokens = pass_of(PLAIN, PASSES[rows])
    queries, keys, values = brought(PLAIN, len(tokens))
    seen: list[None] = []
    FIRST_WAIT.expect(lambda: seen.append(None))
    for layer in range(3):
        attention.attend(pool, queries, places, AttentionCall(layer=layer, scale=0.2), (keys, values))
    FIRST_WAIT.expect(None)
    assert len(seen) == count


def test_a_pass_of_one_token_is_begun_while_it_is_built() -> None:
    attention = CpuAttention()
    pool, places, _, _ = pass_of(PLAIN, [(30, 1)])
    seen: list[None] = []
    FIRST_WAIT.expect(lambda: seen.append(None))
    queries, keys, values = brought(PLAIN, 1)
    attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=0.2), (keys, values))
    FIRST_WAIT.expect(None)
    assert seen == [None]


def test_what_is_no_number_stays_with_its_row() -> None:
    attention = CpuAttention()
    pool, places, _, tokens = pass_of(PLAIN, PASSES["many rows"])
    queries, keys, values = brought(PLAIN, len(tokens))
    keys = mx.where((mx.arange(len(tokens)) == 5)[:, None, None, None], mx.nan, keys)
    found = numbers(
        attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=0.2), (keys, values))
    )
    assert [number for number, row in enumerate(found) if not np.isfinite(row).all()] == [5]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_moves_pages(geometry: Geometry) -> None:
    attention = CpuAttention()
    pool = RandomPool.of(geometry.shape, page_count=12)
    wanted = numbers(pool.array)
    content = RandomPool.of(geometry.shape, page_count=3, seed=5).array
    attention.copy_pages(pool, ints([1, 11]), ints([4, 2]))
    wanted[[4, 2]] = wanted[[1, 11]]
    attention.fill_pages(pool, content, ints([9, 0, 6]))
    wanted[[9, 0, 6]] = numbers(content)
    read = attention.read_pages(pool, ints([6, 9]))
    mx.eval(read)
    assert np.array_equal(numbers(pool.array), wanted)
    attention.fill_pages(pool, content, ints([6, 9, 1]))
    assert np.array_equal(numbers(read), wanted[[6, 9]]), "what was read is a copy"


@pytest.mark.parametrize(("first_token", "key_count"), [(0, 140), (64, 64), (64, 200)])
def test_gathers_a_row(first_token: int, key_count: int) -> None:
    attention = CpuAttention()
    pool, places, _, tokens = pass_of(PLAIN, [(9, 1), (139, 2)])
    _, keys, values = brought(PLAIN, len(tokens))
    attention.write(pool, keys, values, places, layer=LAYER)
    gathered = attention.gather_row(
        pool, places, row=1, layer=LAYER, first_token=first_token, key_count=key_count
    )
    own = range(first_token, min(141, first_token + key_count))
    wanted = keys_and_values(pool, places, 1, LAYER, own).swapaxes(1, 2)
    wanted = np.concatenate([wanted, np.repeat(wanted[:, :, -1:], key_count - len(own), axis=2)], axis=2)
    for found, right in zip(gathered, wanted, strict=True):
        assert np.array_equal(numbers(found), right[None])


def test_a_pool_that_grew_is_another_array() -> None:
    attention = CpuAttention()
    pool, places, _, tokens = pass_of(PLAIN, [(30, 1)])
    queries, keys, values = brought(PLAIN, len(tokens))
    mx.eval(attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=0.2), (keys, values)))
    before = pool.array
    pool.array = mx.concatenate([pool.array, mx.zeros_like(pool.array)])
    attention.read_pages(pool, ints([0]))
    [written] = numbers(pool.array)[places.pages[:1], LAYER, 0, :, 30]
    assert np.array_equal(written, numbers(keys)[0, :, 0])
    assert not np.array_equal(numbers(before), numbers(pool.array)[: before.shape[0]])
