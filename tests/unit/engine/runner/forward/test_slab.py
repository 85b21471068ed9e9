"""Rows in a slab draw what they draw by themselves, and come out of it whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from icehouse_server.engine.runner.forward import ForwardPass, Row, Share, examine
from icehouse_server.engine.runner.forward.slab import SlotClass, class_of
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.fixtures.models import build
from tests.unit.engine.runner.forward.company import Company, Guest, alone, prompt_of


class SlabCompany(Company):
    """Seats rows that decode, and has some of them leave and come back."""

    def step(self, guests: Sequence[Guest]) -> None:
        chance = random.Random(self.pass_count)
        for guest in guests:
            if guest.drawn and chance.random() < 0.7:
                self._forward.seat(guest.row)
            elif guest.drawn and chance.random() < 0.2:
                guest.row.leave_company()
        super().step(guests)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("guesses", [False, True], ids=["plain", "guesses"])
def test_tokens_are_those_of_the_row_alone(architecture: str, guesses: bool) -> None:
    model = build(architecture)
    forward = ForwardPass(model, examine(model))
    assert forward.facts.takes_slab
    for seed in range(2):
        guests = []
        for number, length in enumerate((37, 12, 505, 25, 37, 37)):
            prompt = prompt_of(length, number)
            tokens, logits = alone(model, prompt, 12)
            guests.append(Guest(prompt, tokens, logits, Row(make_prompt_cache(model)), list(prompt)))
        SlabCompany(forward, seed=seed, guesses=guesses).run(guests)
        assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
        assert max(guest.farthest for guest in guests) < 2e-3


def test_rows_of_equal_length_need_no_mask_and_others_get_one() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    for lengths in ((9, 9, 9), (9, 30, 14)):
        prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
        rows = [Row(make_prompt_cache(model)) for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            mx.eval(forward.run(mx.array(prompt[:-1]), [Share(row, len(prompt) - 1)]).arrays)
            forward.seat(row)
        shares = [Share(row, 1, logit_count=1) for row in rows]
        output = forward.run(mx.array([prompt[-1] for prompt in prompts]), shares)
        assert output.logits is not None
        for logits, prompt in zip(output.logits, prompts, strict=True):
            assert mx.argmax(logits).item() == alone(model, prompt, 1)[0][0]
        for row in rows:
            forward.forget(row)


def test_a_row_is_read_and_taken_out_of_its_slot() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    prompts = [prompt_of(length, seed) for seed, length in enumerate((20, 31, 7))]
    rows = [Row(make_prompt_cache(model)) for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        mx.eval(forward.run(mx.array(prompt), [Share(row, len(prompt))]).arrays)
    before = [[mx.array(cache.keys_and_values()[0]) for cache in row.caches] for row in rows]
    for row in rows:
        forward.seat(row)
    for row, layers, prompt in zip(rows, before, prompts, strict=True):
        for cache, keys in zip(row.caches, layers, strict=True):
            assert type(cache) is KVCache and cache.offset == len(prompt)
            assert mx.array_equal(cache.keys_and_values()[0], keys).item()
    rows[0].leave_company()
    assert not rows[0].keepers
    for row, layers in zip(rows, before, strict=True):
        for cache, keys in zip(row.caches, layers, strict=True):
            assert mx.array_equal(cache.keys_and_values()[0], keys).item()


def test_slots_stay_without_gaps() -> None:
    slots = SlotClass(512)
    rows = [Row([KVCache()], token_count=number + 1) for number in range(9)]
    for number, row in enumerate(rows):
        filled = mx.full((1, 2, number + 1, 4), number)
        slots.add(row, {0: (filled, filled)})
    assert slots.buffers[0][0].shape[0] == 16
    for number in (0, 8, 3):
        slots.remove(rows[number])
    slots.close_gaps()
    assert sorted(slots.slots.values()) == list(range(6))
    for number in (1, 2, 4, 5, 6, 7):
        keys, values = slots.views(rows[number], 0, number + 1)
        assert mx.all(keys == number).item() and mx.all(values == number).item()


def test_classes_are_powers_of_two() -> None:
    assert [class_of(count) for count in (1, 512, 513, 1024, 1025)] == [512, 512, 1024, 1024, 2048]
