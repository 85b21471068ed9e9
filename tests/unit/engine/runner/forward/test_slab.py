"""Rows in a slab draw what they draw by themselves, and come out of it whole."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.engine.core.kv_growth import KvGrowth, KvLength
from icehouse_server.engine.kv_cache.caches import quantize_caches
from icehouse_server.engine.runner.forward import ForwardPass, Row, Share, examine
from icehouse_server.engine.runner.forward.slab import Like, Seat, SlotClass, SlotRun
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.fixtures.models import ARCHITECTURES, build
from tests.unit.engine.runner.forward.company import Company, Guest, alone, prompt_of


class SlabCompany(Company):
    """Seats rows that decode, and has some of them leave and come back."""

    def step(self, guests: Sequence[Guest]) -> None:
        chance = random.Random(self.pass_count)
        for guest in guests:
            decodes = guest.drawn and guest.row.token_count and guest.layered is None
            if decodes and chance.random() < 0.7:
                self._forward.seat(guest.row)
            elif guest.drawn and chance.random() < 0.2:
                guest.row.leave_company()
        super().step(guests)


WITHOUT_A_PLAIN_LAYER = ("llama4", "llama4_text", "falcon_h1", "mamba2", "deepseek_v3")


@pytest.mark.parametrize(
    "architecture", [each for each in ARCHITECTURES if each not in WITHOUT_A_PLAIN_LAYER]
)
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
        make = functools.partial(make_prompt_cache, model) if seed else None
        SlabCompany(forward, seed=seed, guesses=guesses, make_caches=make).run(guests)
        assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
        assert max(guest.farthest for guest in guests) < 2e-3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_quantized_rows_share_buffers_too(architecture: str, bits: int) -> None:
    model = build(architecture)

    def make() -> list[Any]:
        return quantize_caches(make_prompt_cache(model), bits=bits, group_size=32)

    forward = ForwardPass(model, examine(model, make_caches=make))
    assert forward.facts.takes_slab
    guests = []
    for number, length in enumerate((37, 12, 205, 25, 37, 37)):
        prompt = prompt_of(length, number)
        tokens, logits = alone(model, prompt, 12, make)
        guests.append(Guest(prompt, tokens, logits, Row(make()), list(prompt)))
    SlabCompany(forward, seed=1, guesses=True, make_caches=make).run(guests)
    assert [guest.drawn for guest in guests] == [guest.want for guest in guests]
    # A chunk attends to what it has quantized itself, so its borders show a little in what follows.
    assert max(guest.farthest for guest in guests) < 2e-2


def test_quantized_rows_have_one_attention_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def make() -> list[Any]:
        return quantize_caches(make_prompt_cache(model), bits=8, group_size=32)

    forward = ForwardPass(model, examine(model, make_caches=make))
    rows = [Row(make()) for _ in range(6)]
    for number, row in enumerate(rows):
        mx.eval(forward.run(mx.array(prompt_of(9 + number % 2, 1)), [Share(row, 9 + number % 2)]).arrays)
    assert forward.seat_together(dict.fromkeys(rows, 1), token_limit=1024)
    calls: list[int] = []
    really = mx.quantized_matmul

    def watched(queries: mx.array, *args: Any, **how: Any) -> mx.array:
        calls.append(queries.shape[0])
        return really(queries, *args, **how)

    monkeypatch.setattr(mx, "quantized_matmul", watched)
    mx.eval(forward.run(mx.array([5] * 6), [Share(row, 1, logit_count=1) for row in rows]).arrays)
    assert calls == [6, 6] * len(model.layers), "scores and sums of all rows together"


def test_rows_of_equal_length_need_no_mask_and_others_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    masks: list[bool] = []
    really = mx.fast.scaled_dot_product_attention

    def watched(*args: Any, mask: Any = None, **how: Any) -> mx.array:
        masks.append(mask is not None)
        return really(*args, mask=mask, **how)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    for lengths in ((9, 9, 9), (9, 30, 14)):
        prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
        rows = [Row(make_prompt_cache(model)) for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            mx.eval(forward.run(mx.array(prompt[:-1]), [Share(row, len(prompt) - 1)]).arrays)
            forward.seat(row)
        shares = [Share(row, 1, logit_count=1) for row in rows]
        masks.clear()
        output = forward.run(mx.array([prompt[-1] for prompt in prompts]), shares)
        assert masks == [len(set(lengths)) > 1] * len(model.layers), "one attention a layer for all rows"
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


def filled_class(count: int) -> tuple[SlotClass, list[Row]]:
    slots = SlotClass(128)
    like = Like(2, 4, mx.float32)
    rows = [Row([KVCache()], token_count=number + 1) for number in range(count)]
    for number, row in enumerate(rows):
        filled = mx.full((1, 2, number + 1, 4), number)
        slots.add(row, {0: (filled, filled)}, {0: (like, like)})
    return slots, rows


@pytest.mark.parametrize("lengths", [(5, 5, 5), (5, 5, 9), (9, 5, 9, 5), (1, 2, 3, 4, 5, 6)])
def test_each_row_is_written_behind_what_it_has_whatever_the_others_have(lengths: tuple[int, ...]) -> None:
    slots, like = SlotClass(16), Like(2, 4, mx.float32)
    rows = [Row([KVCache()], token_count=length) for length in lengths]
    for row in rows:
        slots.add(row, {}, {0: (like, like)})
    keys, values = (mx.random.normal((len(rows), 2, 1, 4)) for _ in range(2))
    SlotRun(slots, rows).write(0, keys, values)
    for buffer, new in zip(slots.buffers[0], (keys, values), strict=True):
        for slot, length in enumerate(lengths):
            expected = mx.zeros((2, 16, 4))
            expected[:, length : length + 1] = new[slot]
            assert mx.array_equal(buffer[slot], expected).item()


def test_closing_gaps_moves_the_rows_from_the_end() -> None:
    slots, rows = filled_class(9)
    assert slots.buffers[0][0].shape == (12, 2, 128, 4)
    for number in (0, 8, 3):
        slots.remove(rows[number])
    assert slots.run_count == 2
    slots.close_gaps()
    assert slots.run_count == 1
    assert sorted(slots.slots.values()) == list(range(6))
    for number in (1, 2, 4, 5, 6, 7):
        keys, values = slots.views(rows[number], 0, number + 1)
        assert mx.all(keys == number).item() and mx.all(values == number).item()


def test_rows_beside_a_gap_attend_in_runs_of_their_own() -> None:
    slots, rows = filled_class(5)
    slots.remove(rows[2])
    for run_rows in (rows[:2], rows[3:]):
        new = mx.full((2, 2, 1, 4), 9.0)
        run = SlotRun(slots, run_rows)
        run.write(0, new, new)
        keys, _ = run.fetch(0)
        for place, row in enumerate(run_rows):
            own = rows.index(row)
            assert mx.all(keys[place, :, : own + 1] == own).item()
            assert mx.all(keys[place, :, own + 1] == 9.0).item()


def test_buffers_have_room_for_as_many_as_are_expected_and_go_with_the_last_row() -> None:
    slots = SlotClass(128)
    like = Like(2, 4, mx.float32)
    row = Row([KVCache()])
    slots.add(row, {}, {0: (like, like)}, slot_count=9)
    assert slots.buffers[0][0].shape[0] == 12
    slots.remove(row)
    assert not slots.buffers


def test_a_third_of_the_slots_at_most_is_empty() -> None:
    """Whatever else is open: sixty slots of 12,288 tokens of an 8B model are 97 GB."""
    slots, like = SlotClass(128), Like(2, 4, mx.float32)
    for count in range(1, 70):
        slots.add(Row([KVCache()]), {}, {0: (like, like)})
        assert count <= slots.buffers[0][0].shape[0] <= max(4, 1.5 * count)


def test_prompts_that_were_never_anywhere_else_draw_what_they_draw_alone() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    first = Row(make_prompt_cache(model))
    mx.eval(forward.run(mx.array([3, 4]), [Share(first, 2)]).arrays)
    forward.seat(first)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((9, 30, 14, 8, 21, 17, 12, 25, 6, 130))]
    rows = [Row(make_prompt_cache(model)) for _ in prompts]
    counts = {row: len(prompt) for row, prompt in zip(rows, prompts, strict=True)}
    assert forward.seat_together(counts, token_limit=1024)
    # The long one is by itself in its length class, and stays so.
    assert [row.seated_caches is not None for row in rows] == [True] * 9 + [False]
    want = [alone(model, prompt, 4)[0] for prompt in prompts]
    shares = [Share(row, len(prompt), logit_count=1) for row, prompt in zip(rows, prompts, strict=True)]
    token_ids = mx.array([token for prompt in prompts for token in prompt])
    drawn: list[list[int]] = [[] for _ in rows]
    for _ in range(4):
        output = forward.run(token_ids, shares)
        assert output.logits is not None
        places = mx.array([begin for begin, _ in output.logit_spans])
        token_ids = mx.argmax(output.logits[places], axis=-1)
        for tokens, token in zip(drawn, token_ids.tolist(), strict=True):
            tokens.append(token)
        shares = [Share(row, 1, logit_count=1) for row in rows]
    assert drawn == want


def test_no_pass_copies_a_buffer_to_write_to_it() -> None:
    """Rows write one after the other, and what reads a buffer meanwhile would have the next one copy it."""
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(16)]
    for row in rows:
        row.length = KvLength(2, 4096)
    mx.eval(forward.run(mx.array([3, 4]), [Share(rows[0], 2)]).arrays)
    forward.seat(rows[0], more=4000, slot_count=16)
    buffer, count = _buffers_of(rows[0])[0], 12
    for row in rows[1:]:
        forward.seat(row, more=4000)

    def excess_bytes(shares: Sequence[Share]) -> int:
        token_ids = mx.array([5] * sum(share.token_count for share in shares))
        mx.reset_peak_memory()
        output = forward.run(token_ids, shares)
        mx.eval(output.logits, output.arrays)
        return mx.get_peak_memory() - mx.get_active_memory()

    prompts = [Share(row, count, logit_count=1) for row in rows[1:9]]
    decoding = [Share(row, 1, logit_count=1) for row in rows[:9]]
    assert excess_bytes(prompts) < buffer.nbytes // 2
    later = [Share(row, count, logit_count=1) for row in rows[9:]]
    assert excess_bytes([*decoding, *later]) < buffer.nbytes // 2
    assert excess_bytes([Share(row, 1, logit_count=1) for row in rows]) < buffer.nbytes // 2


def test_buffers_have_room_for_prompts_that_are_on_their_way() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows, coming = ([Row(make_prompt_cache(model)) for _ in range(count)] for count in (12, 3))
    for row in (*rows, *coming):
        row.length = KvLength(9, 40)
    far = Row(make_prompt_cache(model))
    far.length = KvLength(700, 800)
    for row in rows:
        mx.eval(forward.run(mx.array(prompt_of(9, 1)), [Share(row, 9)]).arrays)
    assert forward.seat_together(dict.fromkeys(rows, 1), coming=[*coming, far], token_limit=1024)
    assert {buffer.shape[0] for row in rows for buffer in _buffers_of(row)} == {16}


def test_slots_of_a_device_that_wants_multiples_are_multiples() -> None:
    """CUDA's fused attention of one token wants buffers whose lengths are multiples of 256."""
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model), growth=KvGrowth(256)) for _ in range(9)]
    for row, count in zip(rows, [5] * 8 + [260], strict=True):
        mx.eval(forward.run(mx.array(prompt_of(count, 1)), [Share(row, count)]).arrays)
        forward.seat(row)
    lengths = [seat.slots.length for row in rows for seat in row.pass_caches if isinstance(seat, Seat)]
    assert lengths == [256] * 8 * len(model.layers) + [512] * len(model.layers)
    assert {buffer.shape[2] for row in rows for buffer in _buffers_of(row)} == {256, 512}


def _buffers_of(row: Row) -> list[mx.array]:
    seats = [seat for seat in row.pass_caches if isinstance(seat, Seat)]
    return [buffer for seat in seats for buffer in seat.slots.buffers[seat.place]]


def test_long_rows_stay_by_themselves() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(9)]
    for row in rows:
        mx.eval(forward.run(mx.array([3, 4]), [Share(row, 2)]).arrays)
    assert not forward.seat_together(dict.fromkeys(rows, 1), token_limit=2)
    assert forward.seat_together(dict.fromkeys(rows, 1), token_limit=1024)


def test_more_rows_than_a_buffer_has_slots_get_another_one() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    prompts = [prompt_of(5 + seed % 4, seed) for seed in range(19)]
    rows = [Row(make_prompt_cache(model)) for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        mx.eval(forward.run(mx.array(prompt[:-1]), [Share(row, len(prompt) - 1)]).arrays)
    assert forward.seat_together(dict.fromkeys(rows, 1), token_limit=1024)
    buffers = {id(seat.slots) for row in rows for seat in row.pass_caches if isinstance(seat, Seat)}
    assert len(buffers) == 2
    output = forward.run(
        mx.array([prompt[-1] for prompt in prompts]), [Share(row, 1, logit_count=1) for row in rows]
    )
    assert output.logits is not None
    places = mx.array([begin for begin, _ in output.logit_spans])
    drawn = mx.argmax(output.logits[places], axis=-1).tolist()
    assert drawn == [alone(model, prompt, 1)[0][0] for prompt in prompts]


@pytest.mark.parametrize(
    ("token_limit", "input_token_count", "seated_at_the_end"), [(256, 220, 0), (1000, 150, 4)]
)
def test_rows_that_came_together_move_one_in_a_pass_and_leave_where_they_are_too_long(
    token_limit: int, input_token_count: int, seated_at_the_end: int
) -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    prompts = [prompt_of(input_token_count, seed) for seed in range(4)]
    step_count = 270 - input_token_count
    expected = [alone(model, prompt, step_count)[0] for prompt in prompts]
    rows = [Row(make_prompt_cache(model)) for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        mx.eval(forward.run(mx.array(prompt[:-1]), [Share(row, len(prompt) - 1)]).arrays)
    assert forward.seat_together(dict.fromkeys(rows, 1), token_limit=token_limit)
    drawn: list[list[int]] = [[prompt[-1]] for prompt in prompts]
    moved: list[int] = []
    for _ in range(step_count):
        before = [_lies_in(row) for row in rows]
        fed = mx.array([tokens[-1] for tokens in drawn])
        output = forward.run(fed, [Share(row, 1, logit_count=1) for row in rows])
        assert output.logits is not None
        found = mx.argmax(output.logits, axis=-1)
        for tokens, (place, _) in zip(drawn, output.logit_spans, strict=True):
            tokens.append(int(found[place].item()))
        moved.append(sum(was != _lies_in(row) for was, row in zip(before, rows, strict=True)))
    assert [tokens[1:] for tokens in drawn] == expected
    assert sum(moved) == 4 and max(moved) == 1
    assert sum(row.seated_caches is not None for row in rows) == seated_at_the_end


@pytest.mark.parametrize(("limit_token_count", "length"), [(88, 128), (1024, 256)])
def test_a_slot_has_room_for_the_reply_where_it_is_short_and_for_much_of_it_where_it_is_long(
    limit_token_count: int, length: int
) -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(4)]
    for number, row in enumerate(rows):
        row.length = KvLength(40, limit_token_count)
        mx.eval(forward.run(mx.array(prompt_of(40, number)), [Share(row, 40)]).arrays)
    assert forward.seat_together(dict.fromkeys(rows, 1), token_limit=1024)
    assert [_lies_in(row) for row in rows] == [length] * 4


def test_a_row_that_ends_within_its_slot_stays_there() -> None:
    model = build("llama")
    forward = ForwardPass(model, examine(model))
    rows = [Row(make_prompt_cache(model)) for _ in range(4)]
    for number, row in enumerate(rows):
        row.length = KvLength(220, 256)
        mx.eval(forward.run(mx.array(prompt_of(220, number)), [Share(row, 220)]).arrays)
    forward.seat_together(dict.fromkeys(rows, 1), token_limit=256)
    places = [_lies_in(row) for row in rows]
    for _ in range(36):
        mx.eval(forward.run(mx.array([9] * 4), [Share(row, 1, logit_count=1) for row in rows]).arrays)
    assert [_lies_in(row) for row in rows] == places


def _lies_in(row: Row) -> int | None:
    """Return how long a row's slot is, None where it has caches of its own."""
    seats = [cache for cache in row.seated_caches or () if isinstance(cache, Seat)]
    return seats[0].slots.length if seats else None
