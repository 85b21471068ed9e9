"""Rows of decoding batches: cut in place or after mlx-lm's `extract`, they equal the sequence run alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.kv_cache.layout import CacheLayout
from icehouse_server.engine.kv_cache.regions import ArrayRegion, evaluate
from mlx_lm.generate import PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from tests.fixtures.models import ARCHITECTURES
from tests.unit.engine.kv_cache.runs import (
    BLOCK,
    CHUNK,
    Recording,
    feed,
    model_of,
    prompt,
    same_bits,
    uninterrupted,
)

BATCHABLE = [architecture for architecture in ARCHITECTURES if architecture != "llama4"]
LENGTHS = (3 * CHUNK, 7, CHUNK + 5, 2 * CHUNK + 1)


def _batch(model: Any, prompts: list[list[int]], *, caches: list[list[Any]] | None = None) -> Any:
    """Prefill each prompt alone on the grid, as the engine does, then decode all of them together."""
    if caches is None:
        caches = [uninterrupted(model, tokens[:-1]) for tokens in prompts]
    merged = PromptProcessingBatch(
        model,
        list(range(len(prompts))),
        caches,
        [tokens[:-1] for tokens in prompts],
        samplers=[greedy_sampler] * len(prompts),
        logits_processors=[[] for _ in prompts],
        stop_sequences=[StopSequences() for _ in prompts],
        max_tokens=[1000] * len(prompts),
    )
    return merged.generate([tokens[-1:] for tokens in prompts])


def _close(left: ArrayRegion, right: ArrayRegion) -> bool:
    return [name for name, _ in left.arrays] == [name for name, _ in right.arrays] and all(
        a.shape == b.shape and mx.allclose(a, b, rtol=1e-3, atol=1e-4).item()
        for (_, a), (_, b) in zip(left.arrays, right.arrays, strict=True)
    )


def _regions(layout: CacheLayout, caches: list[Any], length: int, row: int) -> list[ArrayRegion]:
    window_low = length - min(length, layout.window_token_count or length)
    found = [layout.cut_kv(caches, start=0, stop=length, row=row)]
    found.append(layout.cut_window(caches, start=window_low, stop=length, row=row))
    if layout.needs_checkpoint:
        found.append(layout.cut_checkpoint(caches, row=row))
    evaluate(found)
    return found


@pytest.mark.parametrize("architecture", BATCHABLE)
def test_a_row_equals_the_sequence_alone(architecture: str) -> None:
    model = model_of(architecture)
    layout = CacheLayout.of(make_prompt_cache(model), block_token_count=BLOCK)
    prompts = [prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]
    batch = _batch(model, prompts)
    counts = [len(tokens) for tokens in prompts]
    for _ in range(5):
        batch.next()
    # The short rows are still shorter than the window, in a batch whose ring has turned already.
    _check_rows(layout, model, batch, counts)
    for _ in range(BLOCK):
        batch.next()
    # One leaves and another joins, so that rows are filtered, padded and shifted.
    batch.filter([0, 1, 3])
    late = prompt(CHUNK + 9, seed=9)
    batch.extend(_batch(model, [late]))
    for _ in range(BLOCK + 3):
        batch.next()
    _check_rows(layout, model, batch, [counts[0], counts[1], counts[3], len(late)])


def _check_rows(layout: CacheLayout, model: Any, batch: Any, prompt_counts: list[int]) -> None:
    for row, prompt_count in enumerate(prompt_counts):
        fed = list(batch.tokens[row])
        assert layout.token_count(batch.prompt_cache, row=row) in (len(fed), None)
        alone = _alone(model, fed, prompt_count=prompt_count)
        expected = _regions(layout, alone, len(fed), 0)
        in_place = _regions(layout, batch.prompt_cache, len(fed), row)
        extracted = _regions(layout, batch.extract_cache(row), len(fed), 0)
        for cut, copied, wanted in zip(in_place, extracted, expected, strict=True):
            assert _close(cut, wanted), f"row {row}: {cut.kind} differs from the run alone"
            assert all(same_bits(a, b) for (_, a), (_, b) in zip(cut.arrays, copied.arrays, strict=True))


def test_blocks_are_cut_from_a_row_while_the_next_step_is_in_flight() -> None:
    model = model_of("gemma3_text")
    layout = CacheLayout.of(make_prompt_cache(model), block_token_count=BLOCK)
    batch = _batch(model, [prompt(CHUNK), prompt(7, seed=1)])
    taken: dict[int, ArrayRegion] = {}
    for _ in range(2 * BLOCK):
        batch.next()
        length = len(batch.tokens[0])
        if length % BLOCK == 0:
            taken[length] = layout.cut_window(batch.prompt_cache, start=length - BLOCK, stop=length, row=0)
    assert sorted(taken) == [CHUNK + BLOCK, CHUNK + 2 * BLOCK]
    for length, region in taken.items():
        alone = _alone(model, batch.tokens[0][:length], prompt_count=CHUNK)
        assert _close(region, layout.cut_window(alone, start=length - BLOCK, stop=length))


def _alone(model: Any, fed: list[int], *, prompt_count: int) -> list[Any]:
    caches = uninterrupted(model, fed[: prompt_count - 1])
    for token in fed[prompt_count - 1 :]:
        feed(model, caches, [token])
    return caches


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "lfm2", "falcon_h1"])
def test_restored_sequences_join_a_batch_as_cold_ones_do(architecture: str) -> None:
    model = model_of(architecture)
    recordings = [Recording(model, prompt(length, seed=length)) for length in (CHUNK, 3 * CHUNK)]
    restored = [recording.restore(len(recording.tokens), through_host=True) for recording in recordings]
    prompts = [[*recording.tokens, 11] for recording in recordings]
    cold, warm = _batch(model, prompts), _batch(model, prompts, caches=restored)
    for _ in range(16):
        assert [r.token for r in warm.next()] == [r.token for r in cold.next()]
