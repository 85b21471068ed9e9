"""The GPU's kernels of attention over pages, run as C++, against NumPy."""

from __future__ import annotations

import dataclasses
import io

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.gpu.kernels import Language
from icehouse_server.engine.attention.gpu.launch import GpuAttention, split_size
from icehouse_server.engine.attention.port import AttentionCall, PoolShape

from tests.unit.engine.attention.emulation import HEADER, Emulation
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

LAYER = 1
"""Of three: what is below and above it must stay as it is."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    head_size: int
    group: int
    kv_head_count: int
    page_token_count: int = 16
    dtype: mx.Dtype = mx.float32

    @property
    def shape(self) -> PoolShape:
        return PoolShape(3, self.kv_head_count, self.head_size, self.page_token_count, self.dtype)

    @property
    def head_count(self) -> int:
        return self.group * self.kv_head_count

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def queries(self, token_count: int) -> mx.array:
        return normal(7, token_count, self.head_count, 1, self.head_size, dtype=self.dtype)

    def pool(self, page_count: int) -> RandomPool:
        return RandomPool.of(self.shape, page_count=page_count)

    def tables(self, *token_counts: int, page_count: int) -> list[list[int]]:
        return tables_for(token_counts, page_token_count=self.page_token_count, page_count=page_count)

    def attention(self, emulation: Emulation) -> GpuAttention:
        return GpuAttention(emulation.make_kernel, Language(header=HEADER))


PLAIN = Geometry(64, 2, 2)
GEOMETRIES = [
    PLAIN,
    Geometry(64, 1, 3, 64, mx.bfloat16),
    Geometry(80, 5, 1, 64),  # lanes hold ten numbers, loads of two; blocks of three heads and of two
    Geometry(96, 6, 1),
    Geometry(128, 7, 2, dtype=mx.bfloat16),  # blocks of four heads and of three
    Geometry(128, 8, 1, 64),
    Geometry(192, 3, 1, 64),
    Geometry(256, 16, 1, dtype=mx.bfloat16),
]
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500)
"""Around a page's border, a split's, and four splits."""


def tolerance(dtype: mx.Dtype) -> float:
    """Of results that are about one in size."""
    return 1e-5 if dtype == mx.float32 else 1e-2


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_tokens_see_their_rows(geometry: Geometry, emulation: Emulation) -> None:
    attention, pool = geometry.attention(emulation), geometry.pool(90)
    places = places_in(
        geometry.tables(*LENGTHS, page_count=90), [(row, n - 1) for row, n in enumerate(LENGTHS)]
    )
    queries = geometry.queries(len(LENGTHS))
    sinks = normal(9, geometry.head_count)
    # The window is shorter than a split: another kernel than the one without.
    for window, taken in ((None, None), (100, None), (None, sinks), (100, sinks)):
        found = attention.attend(
            pool,
            queries,
            places,
            AttentionCall(layer=LAYER, scale=geometry.scale, window=window, sinks=taken),
        )
        wanted = attended(
            pool, queries, places, layer=LAYER, scale=geometry.scale, window=window, sinks=taken
        )
        assert found.shape == queries.shape and found.dtype == geometry.dtype
        assert np.abs(numbers(found) - wanted).max() < tolerance(geometry.dtype)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_writes_in_place_and_nothing_else(geometry: Geometry, emulation: Emulation) -> None:
    attention, pool = geometry.attention(emulation), geometry.pool(24)
    tables = geometry.tables(1, 70, 129, page_count=24)
    tokens = [(0, 0), (1, 63), (1, 64), (1, 65), (2, 128)]
    places = places_in(tables, tokens)
    keys, values = (
        normal(seed, len(tokens), geometry.kv_head_count, 1, geometry.head_size, dtype=geometry.dtype)
        for seed in (1, 2)
    )
    array, order, wanted = pool.array, pool.order, numbers(pool.array)
    for index, (row, position) in enumerate(tokens):
        page, at = divmod(position, geometry.page_token_count)
        wanted[tables[row][page], LAYER, :, :, at] = numbers(mx.stack([keys, values]))[:, index, :, 0]
    attention.write(pool, keys, values, places, layer=LAYER)
    assert pool.array is array
    assert np.array_equal(numbers(pool.array), wanted)
    assert pool.order is not order and pool.order.tolist() == [0]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_writes_and_attends_in_one_launch(geometry: Geometry, emulation: Emulation) -> None:
    attention, pool, other = geometry.attention(emulation), geometry.pool(48), geometry.pool(48)
    tables = geometry.tables(1, 17, 200, 300, 65, page_count=48)
    chunk = [(2, position) for position in range(120, 195)]
    places = places_in(tables, [(0, 0), (1, 16), *chunk, (3, 299), (4, 63), (4, 64)])
    keys, values = (
        normal(seed, places.token_count, geometry.kv_head_count, 1, geometry.head_size, dtype=geometry.dtype)
        for seed in (1, 2)
    )
    queries = geometry.queries(places.token_count)
    order = pool.order
    for window in (None, 40):
        found = attention.attend(
            pool,
            queries,
            places,
            AttentionCall(layer=LAYER, scale=geometry.scale, window=window),
            (keys, values),
        )
        attention.write(other, keys, values, places, layer=LAYER)
        assert np.array_equal(numbers(pool.array), numbers(other.array))
        wanted = attended(other, queries, places, layer=LAYER, scale=geometry.scale, window=window)
        assert np.abs(numbers(found) - wanted).max() < tolerance(geometry.dtype)
        keys, values = values, keys
    assert pool.order is not order and pool.order.tolist() == [0]


@pytest.mark.parametrize("token_count", [1, 64, 256])
def test_a_chunk_sees_itself_up_to_each_token(token_count: int, emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(32)
    tables = PLAIN.tables(90 + token_count, 40, page_count=32)
    tokens = [(1, 39), *((0, 90 + index) for index in range(token_count))]
    places = places_in(tables, tokens)
    keys, values = (normal(seed, len(tokens), PLAIN.kv_head_count, 1, PLAIN.head_size) for seed in (1, 2))
    attention.write(pool, keys, values, places, layer=LAYER)
    queries = PLAIN.queries(len(tokens))
    found = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=PLAIN.scale))
    wanted = attended(pool, queries, places, layer=LAYER, scale=PLAIN.scale)
    assert np.abs(numbers(found) - wanted).max() < 1e-5


@pytest.mark.parametrize("core_count", [1, 4, 16, 1000])
def test_splits_do_not_matter(core_count: int, emulation: Emulation) -> None:
    language = Language(header=HEADER, usual_core_count=core_count)
    attention, pool = GpuAttention(emulation.make_kernel, language), PLAIN.pool(80)
    places = places_in(PLAIN.tables(1000, 130, 3, page_count=80), [(0, 999), (1, 129), (2, 2)])
    queries = PLAIN.queries(3)
    found = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=PLAIN.scale))
    assert (
        np.abs(numbers(found) - attended(pool, queries, places, layer=LAYER, scale=PLAIN.scale)).max() < 1e-5
    )


def test_rows_share_pages(emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(8)
    places = places_in([[3, 5, 1], [3, 5, 7], [3, 0]], [(0, 40), (1, 47), (2, 17)])
    queries = PLAIN.queries(3)
    found = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=PLAIN.scale))
    assert (
        np.abs(numbers(found) - attended(pool, queries, places, layer=LAYER, scale=PLAIN.scale)).max() < 1e-5
    )


def test_pages_that_left_the_window_are_not_touched(emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(8)
    queries = PLAIN.queries(1)
    whole = places_in([[4, 5, 6, 7]], [(0, 60)])
    left = places_in([[-1, -1, 6, 7]], [(0, 60)])
    found, wanted = (
        attention.attend(pool, queries, each, AttentionCall(layer=LAYER, scale=PLAIN.scale, window=20))
        for each in (left, whole)
    )
    assert np.array_equal(numbers(found), numbers(wanted))


def test_the_first_tokens_of_a_pass_attend_alone(emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(80)
    places = places_in(PLAIN.tables(30, 700, page_count=80), [(0, 29), (1, 698), (1, 699)])
    queries = PLAIN.queries(1)
    found = attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=PLAIN.scale))
    assert (
        np.abs(numbers(found) - attended(pool, queries, places, layer=LAYER, scale=PLAIN.scale)).max() < 1e-5
    )


@pytest.mark.parametrize(("first_token", "key_count"), [(0, 40), (16, 16), (16, 64), (0, 41), (32, 200)])
def test_gathers_a_row(first_token: int, key_count: int, emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(8)
    places = places_in([[2], [3, 5, 1]], [(0, 9), (1, 39), (1, 40)])
    gathered = attention.gather_row(
        pool, places, row=1, layer=LAYER, first_token=first_token, key_count=key_count
    )
    own = range(first_token, min(41, first_token + key_count))
    wanted = keys_and_values(pool, places, 1, LAYER, own).swapaxes(1, 2)
    wanted = np.concatenate([wanted, np.repeat(wanted[:, :, -1:], key_count - len(own), axis=2)], axis=2)
    for found, right in zip(gathered, wanted, strict=True):
        assert np.array_equal(numbers(found), right[None])


@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=str)
def test_moves_pages(geometry: Geometry, emulation: Emulation) -> None:
    attention, pool = geometry.attention(emulation), geometry.pool(12)
    wanted = numbers(pool.array)
    content = RandomPool.of(geometry.shape, page_count=3, seed=5).array
    attention.copy_pages(pool, ints([1, 11]), ints([4, 2]))
    wanted[[4, 2]] = wanted[[1, 11]]
    assert np.array_equal(numbers(pool.array), wanted)
    attention.fill_pages(pool, content, ints([9, 0, 6]))
    wanted[[9, 0, 6]] = numbers(content)
    assert np.array_equal(numbers(pool.array), wanted)
    assert np.array_equal(numbers(attention.read_pages(pool, ints([6, 9]))), wanted[[6, 9]])


def test_what_was_asked_for_is_done_before_others_write_to_the_pool(emulation: Emulation) -> None:
    """The last page of a row that ended is copied in the next pass: a reader would have been there before."""
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(4)
    before, after = io.StringIO(), io.StringIO()
    pool.order = pool.order + 0
    mx.export_to_dot(before, pool.order)
    assert attention.settle(pool)
    mx.export_to_dot(after, pool.order)
    assert ["shape=rectangle" in graph.getvalue() for graph in (before, after)] == [True, False]


def test_a_pool_that_grew_is_another_array(emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(4)
    attention.copy_pages(pool, ints([0]), ints([1]))
    pool.array, pool.view = mx.concatenate([pool.array, mx.zeros_like(pool.array)]), None
    attention.copy_pages(pool, ints([1]), ints([7]))
    assert np.array_equal(numbers(pool.array)[7], numbers(pool.array)[0])


def test_a_layer_takes_as_many_launches_for_64_rows_as_for_one(emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(80)
    launches = []
    for row_count in (1, 64):
        places = places_in(
            [[row, row + 1] for row in range(row_count)], [(row, 20) for row in range(row_count)]
        )
        keys = normal(1, row_count, PLAIN.kv_head_count, 1, PLAIN.head_size)
        emulation.launches.clear()
        queries = PLAIN.queries(row_count)
        attention.attend(pool, queries, places, AttentionCall(layer=LAYER, scale=PLAIN.scale), (keys, keys))
        launches.append(list(emulation.launches))
    assert launches == [["icehouse_attend"]] * 2


def test_nothing_is_compiled_again(emulation: Emulation) -> None:
    attention, pool = PLAIN.attention(emulation), PLAIN.pool(200)

    def passes(*lengths: int) -> None:
        places = places_in(
            PLAIN.tables(*lengths, page_count=200), [(row, length - 1) for row, length in enumerate(lengths)]
        )
        keys = normal(1, len(lengths), PLAIN.kv_head_count, 1, PLAIN.head_size)
        attention.write(pool, keys, keys, places, layer=len(lengths) % 3)
        for window in (None, 20, 33):
            attention.attend(
                pool,
                PLAIN.queries(len(lengths)),
                places,
                AttentionCall(layer=LAYER, scale=PLAIN.scale / len(lengths), window=window),
            )
        attention.gather_row(pool, places, row=0, layer=LAYER, first_token=0, key_count=lengths[0])
        attention.copy_pages(pool, ints(range(len(lengths))), ints(range(100, 100 + len(lengths))))

    passes(300)
    compiled = emulation.compiled_count
    for lengths in ((301,), (1, 2), (700, 30, 400), (64,) * 9, (1000, 1)):
        passes(*lengths)
    pool.shape = dataclasses.replace(pool.shape, layer_count=1)  # another group's pool
    pool.array = mx.contiguous(pool.array[:, :1])
    attention.copy_pages(pool, ints([3]), ints([4]))
    assert emulation.compiled_count == compiled


H100 = 132


@pytest.mark.parametrize(
    ("visible_counts", "blocks", "expected"),
    [
        ([100], 8, 128),
        ([1_500], 8, 128),
        ([32_000], 8, 1_024),  # 32 splits at most
        ([1_500] * 64, 8, 512),
        ([100] * 64, 8, 128),
        ([1_000] * 2_000, 8, 16_384),
    ],
)
def test_split_sizes(visible_counts: list[int], blocks: int, expected: int) -> None:
    assert split_size(ints(visible_counts), blocks_per_split=blocks, core_count=H100) == expected
