"""Sliding windows: shorter and longer than a block, before and after they wrap, linear and as a ring."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.cache_layout import CacheLayout
from icehouse_server.engine.kv_cache.regions import ArrayRegion
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

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

WINDOWED = [
    ("gemma3_text", {"sliding_window": 8}),
    ("gemma3_text", {"sliding_window": BLOCK}),
    ("gemma3_text", {"sliding_window": 40}),
    ("gemma3_text", {"sliding_window": 600}),
    ("gpt_oss", {"sliding_window": 12}),
    ("gpt_oss", {"sliding_window": 50}),
    ("llama4", {"attention_chunk_size": 8}),
    ("llama4", {"attention_chunk_size": 48}),
]


@pytest.mark.parametrize(("architecture", "overrides"), WINDOWED)
def test_any_window_length_continues_bit_for_bit(architecture: str, overrides: dict[str, int]) -> None:
    model = model_of(architecture, **overrides)
    tokens = prompt(4 * CHUNK + 3)
    recording = Recording(model, tokens)
    for position in (CHUNK, 2 * CHUNK, 4 * CHUNK, 4 * CHUNK + 3):
        expected = uninterrupted(model, tokens[:position])
        restored = recording.restore(position, through_host=True)
        assert [type(cache) for cache in restored] == [type(cache) for cache in expected]
        # Alternate decode and prefill, so that the ring turns, is straightened and turns again.
        for chunk in (tokens[:1], tokens[:1], tokens[:9], tokens[:1], tokens[:CHUNK], tokens[:1]):
            assert same_bits(feed(model, restored, chunk), feed(model, expected, chunk)), (
                position,
                len(chunk),
            )


@pytest.mark.parametrize("window", [8, 24, 40])
def test_regions_cut_from_a_ring_equal_those_cut_from_a_line(window: int) -> None:
    """Decode writes a ring, prefill a line; token for token the kept K/V is what was written."""
    model = model_of("gemma3_text", sliding_window=window)
    layout = CacheLayout.of(make_prompt_cache(model), block_token_count=BLOCK)
    caches = uninterrupted(model, prompt(CHUNK))
    written: list[ArrayRegion] = []
    for step in range(3 * BLOCK):
        feed(model, caches, [11 + step])
        position = CHUNK + step + 1
        written.append(layout.cut_tokens(RegionKind.WINDOW, caches, start=position - 1, stop=position))
        if position % BLOCK == 0:
            cut = layout.cut_tokens(RegionKind.WINDOW, caches, start=position - BLOCK, stop=position)
            for index, (name, array) in enumerate(cut.arrays):
                kept = min(BLOCK, window)
                singles = [region.arrays[index][1] for region in written[-kept:]]
                assert array.shape[2] == kept
                assert same_bits(array, mx.concatenate(singles, axis=2)), (position, name)


def test_a_ring_can_be_cut_a_little_later_than_the_block_ended() -> None:
    model = model_of("gemma3_text", sliding_window=40)
    layout = CacheLayout.of(make_prompt_cache(model), block_token_count=BLOCK)
    caches = uninterrupted(model, prompt(CHUNK))
    greedy(model, caches, 11, BLOCK)
    on_time = layout.cut_tokens(RegionKind.WINDOW, caches, start=CHUNK, stop=CHUNK + BLOCK)
    mx.eval([array for _, array in on_time.arrays])
    greedy(model, caches, 12, 7)
    assert same_regions(
        layout.cut_tokens(RegionKind.WINDOW, caches, start=CHUNK, stop=CHUNK + BLOCK), on_time
    )


def test_only_blocks_inside_the_window_are_needed() -> None:
    model = model_of("gemma3_text", sliding_window=24)
    tokens = prompt(6 * BLOCK)
    recording = Recording(model, tokens)
    position = 6 * BLOCK
    needed_from = position - 24
    facts = recording.layout.facts
    assert facts.window_token_count == facts.shortest_window_token_count == 24
    blocks = tuple(
        block
        if block.end_token_index > needed_from
        else block_of(block.start_token_index, block.token_count, kv=block.regions[RegionKind.KV])
        for block in recording.blocks(stop=position)
    )
    assert sum(RegionKind.WINDOW in block.regions for block in blocks) == 2
    restored = _restore(recording, blocks, position)
    expected = uninterrupted(model, tokens)
    assert same_bits(feed(model, restored, tokens[:5]), feed(model, expected, tokens[:5]))


def test_the_restored_class_and_its_counters_are_exact() -> None:
    recording = Recording(model_of("gemma3_text"), prompt(4 * BLOCK))
    restored = recording.restore(4 * BLOCK)[0]
    assert type(restored) is RotatingKVCache
    assert (restored.offset, restored._idx, restored.keep, restored.max_size) == (64, 24, 0, 24)
    chunked = Recording(model_of("llama4"), prompt(4 * BLOCK)).restore(4 * BLOCK)[0]
    assert (chunked.offset, chunked.start_position, chunked.chunk_size) == (64, 32, 32)


def _restore(recording: Recording, source: tuple[PlacedBlock, ...], token_count: int) -> list[Any]:
    return rebuilt(recording.layout, source, recording.make_caches(), token_count=token_count)
