"""A restored cache continues as an uninterrupted one: bit for bit at the grid, whatever the class."""

from __future__ import annotations

import pytest

from tests.fixtures.models import ARCHITECTURES, FLOAT32_ONLY
from tests.unit.engine.kv_cache.runs import (
    CHUNK,
    Recording,
    feed,
    greedy,
    model_of,
    prompt,
    same_bits,
    uninterrupted,
)

CASES = [
    (architecture, dtype)
    for architecture in ARCHITECTURES
    for dtype in ("float32", "bfloat16", "float16")
    if dtype == "float32" or architecture not in FLOAT32_ONLY
]


@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_every_grid_position_continues_bit_for_bit(architecture: str, dtype: str) -> None:
    model = model_of(architecture, dtype)
    tokens = prompt(5 * CHUNK + 5)
    recording = Recording(model, tokens)
    continuation = prompt(CHUNK, seed=1)
    for position in range(CHUNK, len(tokens), CHUNK if dtype == "float32" else 2 * CHUNK):
        expected = uninterrupted(model, tokens[:position])
        restored = recording.restore(position, through_host=True)
        for chunk in (continuation, tokens[:7]):
            assert same_bits(feed(model, restored, chunk), feed(model, expected, chunk)), position
        expected_run = greedy(model, expected, 11, 3)
        restored_run = greedy(model, restored, 11, 3)
        assert restored_run[0] == expected_run[0]
        assert all(map(same_bits, restored_run[1], expected_run[1])), position


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("position", [CHUNK, 3 * CHUNK, 5 * CHUNK + 5])
def test_decoding_from_a_hit_gives_the_cold_tokens(architecture: str, position: int) -> None:
    model = model_of(architecture)
    tokens = prompt(5 * CHUNK + 5)
    recording = Recording(model, tokens)
    cold = greedy(model, uninterrupted(model, tokens[:position]), tokens[0], 16)
    hit = greedy(model, recording.restore(position), tokens[0], 16)
    assert hit[0] == cold[0]
    assert all(map(same_bits, hit[1], cold[1]))
