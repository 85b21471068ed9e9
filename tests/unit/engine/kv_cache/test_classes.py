"""Cache classes no tiny architecture gives by default: quantized K/V, lists of two, unused slots."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_classes import leaves
from icehouse_server.engine.kv_cache.cache_layout import CacheLayout
from icehouse_server.engine.kv_cache.regions import ArrayRegion, from_host, to_host
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from tests.unit.engine.kv_cache.runs import (
    BLOCK,
    CHUNK,
    Recording,
    block_of,
    feed,
    greedy,
    model_of,
    prompt,
    rebuilt,
    same_bits,
    same_regions,
    uninterrupted,
)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("architecture", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16")])
def test_quantized_kv_is_kept_natively(architecture: str, dtype: str, bits: int) -> None:
    model = model_of(architecture, dtype)

    def make_caches() -> list[Any]:
        return [QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]

    tokens = prompt(3 * CHUNK + 7)
    recording = Recording(model, tokens, make_caches=make_caches)
    assert recording.layout.facts.cuttable_inside
    region = recording.layout.cut_tokens(RegionKind.KV, recording.caches, start=0, stop=BLOCK)
    assert [name for name, _ in region.arrays][:6] == [
        "000.k", "000.k.biases", "000.k.scales", "000.v", "000.v.biases", "000.v.scales"
    ]  # fmt: skip
    assert region.arrays[0][1].dtype == mx.uint32 and region.arrays[0][1].shape[-1] == 32 * bits // 32
    assert same_regions(from_host(to_host(region)), region)
    for position in (CHUNK, 2 * CHUNK, 3 * CHUNK + 7):
        expected = uninterrupted(model, tokens[:position], make_caches=make_caches)
        restored = recording.restore(position, through_host=True)
        assert {type(cache) for cache in restored} == {QuantizedKVCache}
        assert same_bits(feed(model, restored, tokens[:9]), feed(model, expected, tokens[:9]))
        cold, hit = greedy(model, expected, 11, 16), greedy(model, restored, 11, 16)
        assert hit[0] == cold[0]
        assert all(map(same_bits, hit[1], cold[1]))


def test_quantized_kv_matches_inside_a_block() -> None:
    model = model_of("llama")

    def make_caches() -> list[Any]:
        return [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]

    recording = Recording(model, prompt(2 * CHUNK), make_caches=make_caches)
    position = CHUNK + 5
    restored = recording.restore(position)
    for cache, whole in zip(restored, recording.caches, strict=True):
        for mine, theirs in zip((*cache.keys, *cache.values), (*whole.keys, *whole.values), strict=True):
            assert same_bits(mine[:, :, :position], theirs[:, :, :position])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_lists_of_two_kv_caches_with_values_of_no_width(dtype: mx.Dtype) -> None:
    """DeepSeek V3.2 and MiniMax M3 keep an indexer's keys beside each layer's K/V, without values."""

    def make_caches() -> list[Any]:
        return [CacheList(KVCache(), KVCache()), CacheList(KVCache())]

    def step(caches: list[Any], count: int, seed: int) -> list[mx.array]:
        seen = []
        for index, cache in enumerate((caches[0][0], caches[0][1], caches[1][0])):
            keys = mx.random.normal((1, 2, count, 8), dtype=dtype, key=mx.random.key(seed + index))
            values = mx.zeros((1, 2, count, 0), dtype) if index == 1 else keys[..., :5]
            seen += cache.update_and_fetch(keys, values)
        mx.eval(seen)
        return seen

    layout = CacheLayout.of(make_caches(), block_token_count=BLOCK)
    caches = make_caches()
    step(caches, BLOCK, 0)
    step(caches, BLOCK, 10)
    blocks = tuple(
        block_of(
            low,
            BLOCK,
            kv=from_host(to_host(layout.cut_tokens(RegionKind.KV, caches, start=low, stop=low + BLOCK))),
        )
        for low in (0, BLOCK)
    )
    restored = rebuilt(layout, blocks, make_caches(), token_count=2 * BLOCK)
    assert [type(cache) for cache in restored] == [CacheList, CacheList]
    assert {cache.offset for cache in leaves(restored)} == {2 * BLOCK}
    for warm, cold in zip(step(restored, 3, 20), step(caches, 3, 20), strict=True):
        assert warm.shape == cold.shape
        assert warm.size == 0 or same_bits(warm, cold)


def test_an_unused_slot_stays_unused_and_a_lost_one_is_noticed() -> None:
    cache = ArraysCache(size=3)
    cache[1] = mx.ones((1, 2, 4), mx.bfloat16)
    layout = CacheLayout.of([ArraysCache(size=3)], block_token_count=BLOCK)
    taken = from_host(to_host(layout.cut_checkpoint([cache])))
    (restored,) = rebuilt(layout, [block_of(0, 5, checkpoint=taken)], [ArraysCache(size=3)], token_count=5)
    assert restored[0] is None and restored[2] is None
    assert same_bits(restored[1], cache[1])
    assert restored.left_padding is None and restored.lengths is None


def test_writing_in_place_into_a_restored_cache_spares_the_block() -> None:
    """MLX assigns slices through the array object, so a cache must never hold the block's own object."""
    full, state = mx.ones((1, 1, 256, 4)), mx.ones((1, 3, 4))
    kv = ArrayRegion.of(RegionKind.KV, (("000.k", full), ("000.v", full)))
    checkpoint = ArrayRegion.of(RegionKind.CHECKPOINT, (("001.00", state),))

    def make_caches() -> list[Any]:
        return [KVCache(), ArraysCache(size=1)]

    layout = CacheLayout.of(make_caches(), block_token_count=256)
    block = block_of(0, 256, kv=kv, checkpoint=checkpoint)
    restored = rebuilt(layout, [block], make_caches(), token_count=256)
    restored[0].trim(256)
    restored[0].update_and_fetch(mx.zeros((1, 1, 8, 4)), mx.zeros((1, 1, 8, 4)))
    restored[1][0][:, 0] = mx.zeros((4,))
    mx.eval(restored[0].keys, restored[1][0])
    assert same_bits(full, mx.ones((1, 1, 256, 4))) and same_bits(state, mx.ones((1, 3, 4)))
