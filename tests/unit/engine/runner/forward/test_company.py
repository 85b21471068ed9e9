"""Forward passes give each row the tokens it has alone, in whatever company."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.kv_cache.cache_classes import quantize_caches
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.fixtures.models.at_once import examine
from tests.unit.engine.runner.forward.company import (
    DRAW_COUNT,
    Company,
    Guest,
    alone,
    examined,
    guests_of,
    prompt_of,
)

LENGTHS = (1, 37, 12, 25, 60, 2)
TOLERANCE = 2e-3
"""Of logits with a standard deviation of about 4, in float32."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_the_row_alone(architecture: str) -> None:
    """With guesses and without; some come and go, and come back."""
    model, facts = examined(architecture)
    make = functools.partial(make_prompt_cache, model)
    layered_count = dropped_count = 0
    for seed, is_restless in enumerate((False, True)):
        guests = guests_of(architecture, LENGTHS, make)
        company = Company(
            ForwardPass(model, facts),
            seed=seed,
            guesses=is_restless,
            make_caches=make if is_restless else None,
        )
        company.run(guests)
        assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
        assert any(guest.park_count for guest in guests) is is_restless
        assert any(guest.is_cancelled for guest in guests) is is_restless
        assert any(len(guest.drawn) == DRAW_COUNT for guest in guests)
        assert max(guest.farthest for guest in guests) < TOLERANCE
        assert company.widest >= 3, "The rows never met"
        layered_count += company.layered_count
        dropped_count += company.dropped_count
    if facts.layer_count:
        assert layered_count and dropped_count


@pytest.mark.parametrize(
    ("architecture", "bits"), [("llama", 4), ("gemma3_text", 8), ("falcon_h1", 4), ("qwen3_next", 8)]
)
def test_quantized_caches_join_the_same_pass(architecture: str, bits: int) -> None:
    model = examined(architecture)[0]

    def make() -> list[Any]:
        return quantize_caches(make_prompt_cache(model), bits=bits, group_size=32)

    facts = examine(model, make_caches=make)
    guests = []
    for seed, length in enumerate(LENGTHS):
        prompt = prompt_of(length, seed)
        tokens, logits = alone(model, prompt, DRAW_COUNT, make)
        guests.append(Guest(prompt, tokens, logits, Row(make()), list(prompt)))
    # A chunk attends to what it has quantized itself, so its borders show a little in what follows.
    Company(ForwardPass(model, facts), seed=1, guesses=True).run(guests)
    assert PassSplit.ALONE not in facts.modes
    assert max(guest.farthest for guest in guests) < TOLERANCE
    assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
    assert any(type(cache) is QuantizedKVCache for cache in _leaves(guests[0].row.caches))


def _leaves(caches: list[Any]) -> list[Any]:
    return [part for cache in caches for part in getattr(cache, "caches", (cache,))]


def test_ordinary_use_goes_on_beside_passes() -> None:
    model = build("llama4")
    prompt = prompt_of(50, 1)
    before, logits_before = alone(model, prompt, 8)
    forward = ForwardPass(model, examine(model))
    row = Row(make_prompt_cache(model))
    forward.run(mx.array(prompt), [Share(row, len(prompt), logit_count=1)])
    after, logits_after = alone(model, prompt, 8)
    assert before == after
    assert all(mx.array_equal(a, b).item() for a, b in zip(logits_before, logits_after, strict=True))


def test_the_prompt_that_ends_gives_logits_and_others_none() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(3)]
    shares = [Share(rows[0], 5), Share(rows[1], 4, logit_count=1), Share(rows[2], 3, logit_count=3)]
    output = forward.run(mx.array(prompt_of(12, 1)), shares)
    mx.eval(output.arrays)
    assert output.logits is not None and output.logits.shape[0] == 4
    assert output.logit_spans == ((0, 0), (0, 1), (1, 4))
    assert [row.token_count for row in rows] == [5, 4, 3]
    assert all(cache.offset == 5 for cache in rows[0].caches)


def test_shares_are_told_in_the_order_they_were_given() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    prompts = [prompt_of(6, 1), prompt_of(9, 2), prompt_of(4, 3)]
    rows = [Row(make_prompt_cache(model)) for _ in prompts]
    for row, prompt, count in zip(rows, prompts, (5, 0, 3), strict=True):
        if count:
            mx.eval(forward.run(mx.array(prompt[:count]), [Share(row, count)]).arrays)
    fed = [prompts[1], prompts[0][5:], prompts[2][3:]]
    shares = [
        Share(row, len(ids), logit_count=1) for row, ids in zip((rows[1], rows[0], rows[2]), fed, strict=True)
    ]
    output = forward.run(mx.array([token for ids in fed for token in ids]), shares)
    assert output.logits is not None
    for (first, last), prompt in zip(output.logit_spans, (prompts[1], prompts[0], prompts[2]), strict=True):
        assert last == first + 1
        assert mx.argmax(output.logits[first]).item() == alone(model, prompt, 1)[0][0]


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "llama4", "gemma3_text"])
def test_hidden_states_are_what_the_head_reads(architecture: str) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    assert forward.facts.hidden_size
    rows = [Row(make_prompt_cache(model)) for _ in range(2)]
    prompts = [prompt_of(6, 1), prompt_of(9, 2)]
    shares = [Share(rows[0], 6, hidden_count=6), Share(rows[1], 9, hidden_count=1, logit_count=1)]
    output = forward.run(mx.array(prompts[0] + prompts[1]), shares)
    assert output.hidden is not None and output.hidden_spans == ((0, 6), (6, 7))
    whole = getattr(model, "language_model", model)
    body = getattr(whole, "model", None) or whole.backbone
    for (first, last), prompt in zip(output.hidden_spans, prompts, strict=True):
        expected = body(mx.array(prompt)[None], cache=make_prompt_cache(model))[0]
        assert mx.allclose(output.hidden[first:last], expected[-(last - first) :], atol=1e-3).item()


def test_a_prompt_beside_nobody_evaluates_its_caches() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    row = Row([KVCache() for _ in model.layers])
    output = forward.run(mx.array(prompt_of(20, 1)), [Share(row, 20)])
    assert output.logits is None and output.hidden is None
    assert output.arrays, "Nothing would be computed"
