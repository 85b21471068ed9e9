"""Draws: the right distribution, the right filters, and the same draw in any place of any batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.engine.sampling.sampler import are_finite, filter_logits, row_key, sample
from icehouse_server.engine.sampling.sampling_row import SamplingRow
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from tests.unit.engine.sampling.allow_only import AllowOnly

VOCABULARY = 50


def logits(rows: int, seed: int = 3) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(rows, VOCABULARY)).astype(np.float32) * 2)


def row_of(
    params: SamplingParams, drawn_count: int = 0, *, end_token_ids: tuple[int, ...] = ()
) -> SamplingRow:
    """A row of a one-token prompt after `drawn_count` tokens 1."""
    row = DecodeRow(params, prompt_token_ids=(0,), output_token_ids=(1,) * drawn_count)
    return SamplingRow(row, end_token_ids=end_token_ids)


def kept_by(params: SamplingParams, table: mx.array) -> np.ndarray:
    return np.isfinite(np.array(filter_logits(table, [row_of(params)] * len(table))))


def test_greedy_takes_the_peak() -> None:
    table = logits(4)
    rows = [row_of(SamplingParams()) for _ in range(4)]
    assert sample(table, rows).tolist() == mx.argmax(table, axis=-1).tolist()
    assert [row.drawn_count for row in rows] == [1, 1, 1, 1]


BAD = {"nan": np.nan, "all nan": np.nan, "infinite": np.inf, "minus infinite": -np.inf}


@pytest.mark.parametrize("where", BAD)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_row_without_numbers_is_told_from_the_others(where: str, dtype: mx.Dtype) -> None:
    bad_places = slice(None) if where in ("all nan", "minus infinite") else slice(17, 18)
    params = [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, seed=2)]
    rows = [row_of(params[i % 2]) for i in range(6)]
    table = logits(6).astype(dtype)
    for bad in (2, 5):
        table[bad, bad_places] = BAD[where]
    tokens = sample(table, rows)
    assert are_finite(table, tokens, rows).tolist() == [True, True, False, True, True, False]
    assert are_finite(table[:1], tokens[:1], rows[:1]).tolist() == [True]


def test_a_logit_of_minus_infinity_that_is_not_drawn_is_no_fault() -> None:
    table = logits(2)
    table[:, 7:30] = -np.inf
    rows = [row_of(SamplingParams()), row_of(SamplingParams(temperature=2.0, seed=1))]
    assert are_finite(table, sample(table, rows), rows).tolist() == [True, True]


def test_a_row_draws_the_same_alone_and_anywhere_in_a_mixed_batch() -> None:
    table = logits(6)
    params = [
        SamplingParams(temperature=0.8, seed=11),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_p=0.7, seed=12),
        SamplingParams(temperature=1.0, top_k=5, seed=2**64 - 1),
        SamplingParams(temperature=0.5, min_p=0.1, seed=14),
        SamplingParams(temperature=1.0, seed=11),
    ]
    for step in range(5):
        together = sample(table, [row_of(p, step) for p in params]).tolist()
        alone = [sample(table[i : i + 1], [row_of(p, step)]).item() for i, p in enumerate(params)]
        order = [4, 2, 0, 5, 1, 3]
        shuffled = sample(table[mx.array(order)], [row_of(params[i], step) for i in order]).tolist()
        assert together == alone
        assert shuffled == [alone[i] for i in order]


@pytest.mark.parametrize(
    ("size", "places"), [(4, [0, 1, 2]), (512, [0, 7, 511]), (1300, [5, 9, 1299]), (1300, [511, 512, 1100])]
)
def test_draws_follow_the_distribution(size: int, places: list[int]) -> None:
    """Within one block of tokens and over several, the last of them not full."""
    shares = np.zeros(size, np.float32)
    shares[places] = [0.5, 0.3, 0.2]
    table = mx.log(mx.array(shares[None]))
    count = 4000
    rows = [row_of(SamplingParams(temperature=1.0, seed=7), i) for i in range(count)]
    drawn = np.array(sample(mx.broadcast_to(table, (count, size)), rows))
    found = np.bincount(drawn, minlength=size) / count
    assert found[shares == 0].sum() == 0.0
    assert np.abs(found - shares).max() < 0.03, found[places]


def test_the_last_bits_of_the_logits_turn_no_draw() -> None:
    """They differ with the batch; a draw that hung on them would make a seed's text depend on its company."""
    dice = np.random.default_rng(7)
    values = dice.normal(size=(100, 20_011)).astype(np.float32) * 2
    rounded = values * (1 + dice.normal(size=values.shape).astype(np.float32) * 1e-6)
    params = [SamplingParams(temperature=1.2, seed=seed) for seed in range(100)]
    for step in range(20):
        draws = [
            sample(mx.array(table), [row_of(p, step) for p in params]).tolist() for table in (values, rounded)
        ]
        assert draws[0] == draws[1], f"after {step} tokens"


@pytest.mark.parametrize(
    ("params", "reference"),
    [
        (SamplingParams(temperature=1, top_p=0.6), lambda x: apply_top_p(x, 0.6)),
        (SamplingParams(temperature=1, top_k=7), lambda x: apply_top_k(x, 7)),
        (SamplingParams(temperature=1, min_p=0.2), lambda x: apply_min_p(x, 0.2)),
    ],
)
def test_filters_keep_what_mlx_lm_keeps(params: SamplingParams, reference) -> None:
    table = logits(8)
    logprobs = table - mx.logsumexp(table, axis=-1, keepdims=True)
    ours = kept_by(params, table)
    assert (ours == np.isfinite(np.array(reference(logprobs)))).all()
    assert 0 < ours.sum() < ours.size


def test_filters_apply_to_their_own_row_only() -> None:
    table = logits(3)
    params = [SamplingParams(temperature=1, top_k=1), SamplingParams(temperature=1, top_p=1e-6)]
    params.append(SamplingParams(temperature=1, top_k=VOCABULARY + 5))
    kept = np.isfinite(np.array(filter_logits(table, [row_of(p) for p in params]))).sum(axis=1)
    assert kept.tolist() == [1, 1, VOCABULARY]


def test_keys_differ_by_seed_and_by_draw() -> None:
    keys = {row_key(seed=s, drawn_count=n) for s in range(50) for n in range(50)}
    assert len(keys) == 2500


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("end_token_ids", [(), (3, 17, 40)])
def test_xtc_leaves_out_what_mlx_lm_leaves_out(threshold: float, end_token_ids: tuple[int, ...]) -> None:
    table = logits(8)
    rows = [
        row_of(
            SamplingParams(
                temperature=1, top_p=0.9, min_p=0.01, top_k=4, xtc_probability=1.0, xtc_threshold=threshold
            ),
            end_token_ids=end_token_ids,
        )
        for _ in range(8)
    ]
    expected = table - mx.logsumexp(table, axis=-1, keepdims=True)
    expected = apply_min_p(apply_top_p(expected, 0.9), 0.01)
    expected = apply_top_k(apply_xtc(expected, 1.0, threshold, list(end_token_ids)), 4)
    ours = np.isfinite(np.array(filter_logits(table, rows)))
    assert (ours == np.isfinite(np.array(expected))).all()
    if threshold == 0.02:
        plain = [row_of(SamplingParams(temperature=1, top_p=0.9, min_p=0.01, top_k=4))] * 8
        assert (ours != np.isfinite(np.array(filter_logits(table, plain)))).any(), "XTC does something"


def test_xtc_comes_as_often_as_asked_and_is_drawn_apart_from_the_token() -> None:
    count = 2000
    table = mx.broadcast_to(mx.log(mx.array([[0.5, 0.3, 0.2]])), (count, 3))
    params = SamplingParams(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.25, seed=9)
    rows = [row_of(params, i) for i in range(count)]
    is_left_out = np.isneginf(np.array(filter_logits(table, rows)))[:, 0]
    assert abs(is_left_out.mean() - 0.3) < 0.03
    drawn = np.array(sample(table, rows))
    shares = np.bincount(drawn, minlength=3) / count
    # 0.3 of the draws are without token 0: 0.3 / 0.5 and 0.2 / 0.5 of those go to 1 and 2.
    assert np.abs(shares - [0.35, 0.39, 0.26]).max() < 0.03, shares


def test_filters_and_xtc_do_not_touch_a_greedy_row() -> None:
    table = logits(4)
    params = SamplingParams(top_k=1, top_p=0.1, min_p=0.9, xtc_probability=1.0, xtc_threshold=0.0)
    assert sample(table, [row_of(params)] * 4).tolist() == mx.argmax(table, axis=-1).tolist()


any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 1, 7]),
    min_p=st.sampled_from([0.0, 0.05]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.02, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    repetition_window=st.sampled_from([0, 3]),
    presence_penalty=st.sampled_from([0.0, 1.0, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    frequency_window=st.sampled_from([0, 2]),
    logit_bias=st.sampled_from([(), ((4, 2.0), (9, -3.0))]),
    banned=st.sampled_from([(), ((5,), (1, 6))]),
    min_output_token_count=st.sampled_from([0, 4]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(any_params, min_size=1, max_size=9), step=st.integers(0, 6), data=st.data())
def test_any_row_draws_the_same_in_any_place_of_any_batch(
    params: list[SamplingParams], step: int, data: st.DataObject
) -> None:
    table = logits(len(params), seed=step)
    outputs = data.draw(
        st.lists(st.tuples(*[st.integers(0, 9)] * step), min_size=len(params), max_size=len(params))
    )

    constraint = st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1).map(AllowOnly)
    constraints = data.draw(st.lists(constraint, min_size=len(params), max_size=len(params)))

    def rows(indices: list[int]) -> list[SamplingRow]:
        made = [DecodeRow(params[i], (1, 2, 3), outputs[i], constraint=constraints[i]) for i in indices]
        return [SamplingRow(row, end_token_ids=(7, 8)) for row in made]

    everyone = list(range(len(params)))
    alone = [sample(table[i : i + 1], rows([i])).item() for i in everyone]
    order = data.draw(st.permutations(everyone))
    for may_wait in (False, True):
        assert sample(table, rows(everyone), may_wait=may_wait).tolist() == alone
        shuffled = sample(table[mx.array(order)], rows(order), may_wait=may_wait).tolist()
        assert shuffled == [alone[i] for i in order]


def test_no_mask_is_made_for_a_greedy_row_whose_peak_is_allowed() -> None:
    table = logits(4)
    peaks = [int(peak) for peak in np.argmax(np.array(table), axis=-1)]
    others = [peak - 1 if peak else 1 for peak in peaks]
    constraints = [AllowOnly({peaks[0], 3}), AllowOnly({others[1]}), None, AllowOnly({peaks[3], others[3]})]
    params = [SamplingParams()] * 3 + [SamplingParams(temperature=1.0)]
    rows = [
        SamplingRow(DecodeRow(one, (0,), constraint=constraint))
        for one, constraint in zip(params, constraints, strict=True)
    ]
    before = np.array(table)
    drawn = np.array(sample(table, rows, may_wait=True)).tolist()
    assert drawn[:3] == [peaks[0], others[1], peaks[2]] and drawn[3] in {peaks[3], others[3]}
    assert [c.mask_count for c in constraints if c is not None] == [0, 1, 1], "a sampled row needs its mask"
    assert [row.drawn_count for row in rows] == [1, 1, 1, 1]
    assert (np.array(table) == before).all(), "the model's logits are left as they were"
