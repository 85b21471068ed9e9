"""top_p and top_k over vocabularies that are not ranked as a whole."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.sampling import top_p
from icehouse_server.engine.sampling.sampler import filter_logits, sample
from mlx_lm.sample_utils import apply_top_k, apply_top_p

from tests.unit.engine.sampling.test_sampler import row_of

VOCABULARY = 2 * top_p.CANDIDATE_COUNT
SHARP, FLAT = 6.0, 0.1
"""Spreads of logits whose nucleus lies within the candidates and beyond them."""


def logits(*spreads: float) -> mx.array:
    table = np.random.default_rng(1).normal(size=(len(spreads), VOCABULARY)) * np.array(spreads)[:, None]
    return mx.array(table.astype(np.float32))


def kept(table: mx.array, *params: SamplingParams, may_wait: bool) -> np.ndarray:
    return np.isfinite(np.array(filter_logits(table, [row_of(p) for p in params], may_wait=may_wait)))


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("spread", [SHARP, FLAT])
def test_it_keeps_what_mlx_lm_keeps(spread: float, may_wait: bool) -> None:
    table = logits(spread)
    logprobs = table - mx.logsumexp(table, axis=-1, keepdims=True)
    ours = kept(table, SamplingParams(temperature=1, top_p=0.9), may_wait=may_wait)
    # mlx-lm adds the masses up from below: among thousands of equal ones the edge may be one token off.
    assert (ours != np.isfinite(np.array(apply_top_p(logprobs, 0.9)))).sum() <= (1 if spread == FLAT else 0)
    assert (ours.sum() > top_p.CANDIDATE_COUNT) == (spread == FLAT), "both ways are gone"
    for top_k in (7, top_p.CANDIDATE_COUNT, top_p.CANDIDATE_COUNT + 1):
        ours = kept(table, SamplingParams(temperature=1, top_k=top_k), may_wait=may_wait)
        assert (ours == np.isfinite(np.array(apply_top_k(logprobs, top_k)))).all()
        late = SamplingParams(temperature=1, top_k=top_k, xtc_probability=1.0, xtc_threshold=0.5)
        assert kept(table, late, may_wait=may_wait).sum() == top_k


def test_company_changes_nothing() -> None:
    """Whether everything is ranked depends on all rows; what a row keeps and draws does not."""
    params = [
        SamplingParams(temperature=1, top_p=0.8, seed=3),
        SamplingParams(temperature=1, top_p=0.95, seed=4),
        SamplingParams(temperature=1, top_k=11, seed=5),
        SamplingParams(temperature=1, top_k=50, top_p=0.5, seed=6),
        SamplingParams(temperature=1, min_p=0.001, seed=7),
    ]
    table = logits(SHARP, FLAT, SHARP, FLAT, SHARP)
    together = kept(table, *params, may_wait=True)
    drawn = np.array(sample(table, [row_of(p) for p in params], may_wait=True))
    for index, one in enumerate(params):
        row = table[index : index + 1]
        for may_wait in (True, False):
            assert (kept(row, one, may_wait=may_wait) == together[index]).all(), (index, may_wait)
        assert sample(row, [row_of(one)], may_wait=True).item() == drawn[index]


def test_a_vocabulary_that_is_mostly_masked_loses_nothing() -> None:
    table = mx.where(mx.arange(VOCABULARY)[None] < 3, logits(SHARP), -mx.inf)
    ours = kept(table, SamplingParams(temperature=1, top_p=0.999999), may_wait=True)
    assert 1 <= ours.sum() <= 3 and not ours[:, 3:].any()
