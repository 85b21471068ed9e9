"""Passes of several chunks hold what there is memory for; padding is a part of a chunk's size."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.engine.core.memory_model import MemoryModel, ModelShape
from icehouse_server.engine.scheduling.limits import SchedulerLimits

LIMITS = SchedulerLimits(
    running_limit=9, prefilling_limit=9, prefill_chunk_token_count=2048, pass_token_count=8192
)
SHAPE = ModelShape(
    hidden_size=2560,
    layer_count=36,
    head_count=32,
    feed_forward_size=9728,
    vocabulary_size=0,
    compute_bytes=2,
    keeps_scores=False,
)
"""Of Qwen3-4B: 180 KB of activations a token."""


@pytest.mark.parametrize(
    ("free_gib", "token_count"),
    [(119, 8192), (8, 2978), (1, 2048), (-1, 2048)],
    ids=["H200", "Mac", "1", "0"],
)
def test_a_pass_holds_the_tokens_that_memory_is_for_and_a_chunk_at_least(
    free_gib: int, token_count: int
) -> None:
    model = MemoryModel(SHAPE, kv_bytes_per_token=147_456, fixed_bytes_per_sequence=0)
    limits = LIMITS.within(model, free_bytes=free_gib << 30)
    assert limits.most_pass_token_count == token_count
    assert model.chunk_bytes(chunk_token_count=token_count, context_token_count=0) <= max(
        free_gib << 26, 2048 * 180_224
    )


def test_padding_counts_where_attention_pads() -> None:
    padded = dataclasses.replace(LIMITS, pads_attention=True, prefill_grid_token_count=64)
    assert LIMITS.size_of_chunk(300, 100).score_count == 100 * 400
    assert padded.size_of_chunk(300, 100).score_count == 256 * 512
    assert padded.size_of_chunk(300, 64) == LIMITS.size_of_chunk(300, 64), "a kernel takes any length"
