"""Pools share what KV may take: windows get little where other layers keep every token."""

from __future__ import annotations

import mlx.core as mx
from icehouse_server.engine.attention.port import PoolShape
from icehouse_server.engine.kv.page_groups import GroupFacts, pool_sizes

GIB = 1 << 30


def facts(layer_count: int, window: int | None) -> GroupFacts:
    shape = PoolShape(layer_count, 4, 256, 64, mx.bfloat16)
    return GroupFacts(shape, {layer: layer for layer in range(layer_count)}, window)


def test_a_model_without_windows_has_one_pool_of_all() -> None:
    assert pool_sizes([facts(36, None)], size_bytes=40 * GIB) == [40 * GIB]


def test_no_pool_is_larger_than_the_largest_array_of_the_device() -> None:
    assert pool_sizes([facts(36, None)], size_bytes=40 * GIB, array_limit_bytes=36 * GIB) == [36 * GIB]


def test_windows_get_what_their_rows_need_and_other_layers_the_rest() -> None:
    found = pool_sizes([facts(4, None), facts(22, 512)], size_bytes=40 * GIB)
    per_token = 22 * 2 * 4 * 256 * 2
    assert found[1] < 20 * GIB and found[1] // per_token > 256 * 512
    assert 39 * GIB < sum(found) <= 40 * GIB


def test_a_small_share_is_divided_by_what_a_token_takes() -> None:
    small, large = pool_sizes([facts(4, None), facts(22, 4096)], size_bytes=26 << 20)
    assert small == 4 << 20 and large == 22 << 20
