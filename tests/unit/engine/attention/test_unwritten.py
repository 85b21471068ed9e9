"""Slots of pages that nobody has written hold anything, NaN too, and no backend's answer depends on them.

A row that was restored from SSD has in the pages of a sliding window what its window saw, and nothing before.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention, attend_row
from icehouse_server.engine.attention.gpu.kernels import Language
from icehouse_server.engine.attention.gpu.launch import GpuAttention
from icehouse_server.engine.attention.port import AttentionCall, PagedAttention, PoolShape, TokenPlaces

from tests.unit.engine.attention.emulation import HEADER, Emulation
from tests.unit.engine.attention.pools import RandomPool, attended, normal, numbers, places_in

SHAPE = PoolShape(2, 2, 64, 16, mx.float32)
HEAD_COUNT, LAYER, SCALE = 4, 1, 0.125
TABLE = [7, 3, 9, 5, 1, 8]
ON_CPU = mx.default_device() == mx.Device(mx.cpu)


def pool_with(written: range) -> RandomPool:
    """Return a pool in which a row of `TABLE` has these tokens, and nothing else is a number."""
    pool = RandomPool.of(SHAPE, page_count=10)
    content = np.full(pool.array.shape, np.nan, np.float32)
    size = SHAPE.page_token_count
    for token in written:
        page, slot = TABLE[token // size], token % size
        content[page, :, :, :, slot] = numbers(pool.array)[page, :, :, :, slot]
    pool.array = mx.array(content)
    mx.eval(pool.array)
    return pool


def tokens(first: int, count: int) -> tuple[TokenPlaces, mx.array]:
    places = places_in([TABLE], [(0, first + n) for n in range(count)])
    return places, normal(7, count, HEAD_COUNT, 1, SHAPE.head_size)


@pytest.fixture(params=["gather", "cpu", "gpu"])
def backend(request: pytest.FixtureRequest, emulation: Emulation) -> PagedAttention:
    if request.param == "cpu" and not ON_CPU:
        pytest.skip("an array is not host memory there")
    if request.param == "gpu":
        return GpuAttention(emulation.make_kernel, Language(header=HEADER))
    return CpuAttention() if request.param == "cpu" else GatherAttention()


@pytest.mark.parametrize("window", [None, 5, 20, 40])
@pytest.mark.parametrize(("first", "count"), [(70, 1), (63, 3), (50, 30), (3, 40)])
def test_only_what_is_visible_is_read(
    backend: PagedAttention, window: int | None, first: int, count: int
) -> None:
    seen_from = 0 if window is None else max(0, first + 1 - window)
    pool = pool_with(range(seen_from, first + count))
    places, queries = tokens(first, count)
    wanted = attended(pool, queries, places, layer=LAYER, scale=SCALE, window=window)
    call = AttentionCall(layer=LAYER, scale=SCALE, window=window, sinks=None)
    together = backend.attend(pool, queries, places, call)
    alone = attend_row(backend, pool, queries, places, call, first=0)
    for ours in (together, alone):
        assert np.abs(numbers(ours) - wanted).max() < 1e-5


@pytest.mark.parametrize("window", [None, 20])
def test_a_mask_of_a_chunk_is_cut_to_what_its_window_sees(
    backend: PagedAttention, window: int | None
) -> None:
    """As of pictures, whose tokens see each other: the whole of one is in the chunk."""
    first, count = 50, 30
    pool = pool_with(range(0 if window is None else first + 1 - window, first + count))
    places, queries = tokens(first, count)
    asking, seen = np.arange(first, first + count)[:, None], np.arange(first + count)
    causal = (seen <= asking) & (seen > asking - (window or first + count))
    call = AttentionCall(layer=LAYER, scale=SCALE, window=window, sinks=None)
    ours = attend_row(backend, pool, queries, places, call, first=0, mask=mx.array(causal))
    wanted = attended(pool, queries, places, layer=LAYER, scale=SCALE, window=window)
    assert np.abs(numbers(ours) - wanted).max() < 1e-5
