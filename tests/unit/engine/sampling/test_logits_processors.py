"""Penalties, bias, bans and masks against mlx-lm's own transforms and against plain counting."""

from __future__ import annotations

import math
import random
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.engine.sampling.sampler import shape_logits
from icehouse_server.engine.sampling.sampling_row import SamplingRow
from mlx_lm.sample_utils import make_logits_processors

from tests.unit.engine.sampling.allow_only import AllowOnly

VOCABULARY = 50
END = 7


def table(rows: int = 1, seed: int = 5) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(rows, VOCABULARY)).astype(np.float32) * 3)


def row(params: SamplingParams, *, prompt=(0,), output=(), constraint=None) -> SamplingRow:
    made = DecodeRow(params, tuple(prompt), tuple(output), constraint=constraint)
    return SamplingRow(made, end_token_ids=(END,))


def shaped(params: SamplingParams, **kwargs) -> np.ndarray:
    return np.array(shape_logits(table(), [row(params, **kwargs)]))[0]


@pytest.mark.parametrize(
    ("params", "reference", "is_of_output"),
    [
        (SamplingParams(repetition_penalty=1.3), {"repetition_penalty": 1.3, "window": 10_000}, False),
        (SamplingParams(repetition_penalty=0.8, repetition_window=4), {"repetition_penalty": 0.8}, False),
        (SamplingParams(presence_penalty=0.7), {"presence_penalty": 0.7, "window": 10_000}, True),
        (SamplingParams(presence_penalty=-0.7, presence_window=4), {"presence_penalty": -0.7}, True),
        (SamplingParams(frequency_penalty=0.4), {"frequency_penalty": 0.4, "window": 10_000}, True),
        (SamplingParams(frequency_penalty=0.4, frequency_window=4), {"frequency_penalty": 0.4}, True),
        (SamplingParams(logit_bias=((3, 2.5), (11, -100.0))), {"logit_bias": {3: 2.5, 11: -100.0}}, False),
        (
            SamplingParams(repetition_penalty=1.3, repetition_window=4, logit_bias=((9, 5.0), (1, -4.0))),
            {"repetition_penalty": 1.3, "logit_bias": {9: 5.0, 1: -4.0}},
            False,
        ),
    ],
)
def test_each_change_is_mlx_lms_own(params: SamplingParams, reference: dict, is_of_output: bool) -> None:
    prompt, output = [1, 2, 3, 9, 9, 20], [4, 9, 4, 30, 9, 4]
    window = reference.pop("window", 4)
    sizes = {f"{kind}_context_size": window for kind in ("repetition", "presence", "frequency")}
    # Presence and frequency are of the output alone, as OpenAI has them; mlx-lm counts the prompt in.
    seen = output if is_of_output else prompt + output
    expected = table()
    for processor in make_logits_processors(**reference, **sizes):
        expected = processor(mx.array(seen), expected)
    assert np.allclose(shaped(params, prompt=prompt, output=output), np.array(expected)[0], atol=1e-6)


def test_penalties_follow_the_tokens_as_they_are_drawn() -> None:
    dice = random.Random(4)
    params = SamplingParams(
        repetition_penalty=1.2,
        repetition_window=9,
        presence_penalty=0.5,
        presence_window=5,
        frequency_penalty=0.3,
        frequency_window=3,
        logit_bias=((2, 1.0), (40, -1.0)),
        banned=((5,), (3, 4), (1, 2, 3)),
    )
    prompt = [dice.randrange(6) for _ in range(5)]
    growing = row(params, prompt=prompt)
    output: list[int] = []
    for step in range(200):
        told = np.array(shape_logits(table(), [growing]))
        rebuilt = np.array(shape_logits(table(), [row(params, prompt=prompt, output=output)]))
        assert (told == rebuilt).all(), f"after {step} tokens"
        output.append(dice.randrange(6) if dice.random() < 0.8 else dice.randrange(VOCABULARY))
        growing.accept(output[-1])
        growing.drawn_count += 1


@pytest.mark.parametrize(
    ("prompt", "output", "banned_now"),
    [
        ([0], [], {5}),
        ([0], [3], {5, 4}),
        ([0], [1, 2], {5, 3}),
        ([1], [2], {5, 3}),
        ([0, 1, 2], [], {5, 3}),
        ([0], [1, 2, 3], {5, 4}),
        ([0], [2, 1], {5}),
    ],
)
def test_the_last_token_of_a_banned_sequence_is_taken_away(prompt, output, banned_now: set[int]) -> None:
    params = SamplingParams(banned=((5,), (3, 4), (1, 2, 3)))
    left = shaped(params, prompt=prompt, output=output)
    assert {int(i) for i in np.flatnonzero(np.isneginf(left))} == banned_now


def test_end_tokens_are_banned_until_enough_was_drawn() -> None:
    params = SamplingParams(min_output_token_count=2)
    banned = [np.isneginf(shaped(params, output=[1] * drawn))[END] for drawn in range(4)]
    assert banned == [True, True, False, False]


@pytest.mark.parametrize("word_count", [1, 2, 3])
def test_a_mask_leaves_what_it_allows(word_count: int) -> None:
    allowed = {0, 3, 31} | ({32, 49} if word_count > 1 else set())
    left = shaped(SamplingParams(), constraint=AllowOnly(allowed, word_count=word_count))
    assert {int(i) for i in np.flatnonzero(np.isfinite(left))} == allowed


def test_a_ban_yields_where_it_would_leave_nothing() -> None:
    params = SamplingParams(banned=((3,), (4,)), min_output_token_count=5)
    only_banned = shaped(params, constraint=AllowOnly({3, END}))
    assert {int(i) for i in np.flatnonzero(np.isfinite(only_banned))} == {3, END}
    one_free = shaped(params, constraint=AllowOnly({3, END, 10}))
    assert {int(i) for i in np.flatnonzero(np.isfinite(one_free))} == {10}


def test_rows_are_changed_each_for_itself_and_plain_ones_not_at_all() -> None:
    logits = table(4)
    rows = [
        row(SamplingParams()),
        row(SamplingParams(repetition_penalty=2.0, presence_penalty=1.0), output=[8, 9]),
        row(SamplingParams(banned=((8,),)), constraint=AllowOnly({8, 9, 10})),
        row(SamplingParams(logit_bias=((8, 50.0),))),
    ]
    before = np.array(logits)
    together = np.array(shape_logits(logits, rows))
    alone = [np.array(shape_logits(logits[i : i + 1], [each]))[0] for i, each in enumerate(rows)]
    assert (np.array(logits) == before).all(), "the model's logits are left as they were"
    assert (together == np.stack(alone)).all()
    assert (together[0] == before[0]).all()
    assert math.isinf(together[2][8]) and np.isfinite(together[2][[9, 10]]).all()
    assert together[3].argmax() == 8


def test_masks_are_made_for_bound_rows_alone_and_spread_on_the_device() -> None:
    """One row with a form among 64 sends words of its own: 19 kB for 152,000 tokens, not 64 times that, nor
    a byte for each token."""
    vocabulary_size, word_count = 152_000, 4_750
    rows = [row(SamplingParams()) for _ in range(63)]
    rows.append(row(SamplingParams(), constraint=AllowOnly({8, 9}, word_count=word_count)))
    logits = mx.zeros((64, vocabulary_size))
    tracemalloc.start()
    try:
        shaped = shape_logits(logits, rows)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shaped.shape == (64, vocabulary_size)
    assert peak_bytes < 3 * 4 * word_count, peak_bytes
