"""top_p and top_k, found without ranking the vocabulary as a whole, keep what ranking it keeps."""

from __future__ import annotations

import io
import re
import shutil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from icehouse_server.device import Backend
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.sampling import top_p
from icehouse_server.engine.sampling.sampler import filter_logits, sample
from icehouse_server.engine.sampling.top_p import reach
from mlx_lm.sample_utils import apply_top_k, apply_top_p

from tests.unit.engine.sampling.test_sampler import row_of

VOCABULARY = 2 * top_p.CANDIDATE_COUNT
SHARP, FLAT = 6.0, 0.1
"""Spreads of logits whose nucleus lies within the candidates and beyond them."""


def logits(*spreads: float) -> mx.array:
    table = np.random.default_rng(1).normal(size=(len(spreads), VOCABULARY)) * np.array(spreads)[:, None]
    return mx.array(table.astype(np.float32))


def kept(table: mx.array, *params: SamplingParams, may_wait: bool) -> np.ndarray:
    return np.isfinite(
        np.array(filter_logits(table, [row_of(p) for p in params], may_wait=may_wait).astype(mx.float32))
    )


def ties(table: np.ndarray) -> np.ndarray:
    """Logits as a model in bfloat16 gives them: few values, many tokens at each."""
    return np.round(table * 4) / 4


SHAPES = {
    "sharp": lambda source: source.normal(size=VOCABULARY) * SHARP,
    "flat": lambda source: source.normal(size=VOCABULARY) * FLAT,
    "ties": lambda source: ties(source.normal(size=VOCABULARY) * 3),
    "equal": lambda source: np.full(VOCABULARY, 7.5),
    "far": lambda source: source.normal(size=VOCABULARY) * 1e4,
    "peak": lambda source: np.where(np.arange(VOCABULARY) == 17, 90.0, source.normal(size=VOCABULARY)),
    "masked": lambda source: np.where(source.random(VOCABULARY) < 0.999, -np.inf, 1.0),
    "one left": lambda source: np.where(np.arange(VOCABULARY) == 3, 0.0, -np.inf),
    "tiny": lambda source: source.normal(size=VOCABULARY) * 1e-30,
}


def expected(row: np.ndarray, share: float, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank a whole row in double precision; return what is kept, and what may be either way.

    Tokens as far from the peak as each other go together. Ours are sums of thousands of numbers in single
    precision, so a token just where the mass is reached may fall on either side.
    """
    distances = (row.max() - row).astype(np.float64)
    order = np.argsort(distances, kind="stable")
    weights = np.exp(-distances[order])
    first = np.searchsorted(distances[order], distances[order], side="left")
    before = np.concatenate([[0.0], np.cumsum(weights)])[first] / weights.sum()
    in_count = (first < top_k) if top_k else np.ones(len(row), dtype=bool)
    found, unsure = np.zeros(len(row), dtype=bool), np.zeros(len(row), dtype=bool)
    found[order] = in_count & ((before < share) | (share >= 1.0))
    unsure[order] = in_count & (np.abs(before - share) < 4e-5)
    return found, unsure


@settings(deadline=None, max_examples=25)
@example(shape="sharp", seed=99190, share=0.999999, top_k=0)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 2**32 - 1),
    share=st.one_of(st.floats(1e-9, 1.0, exclude_min=True), st.sampled_from([0.9, 0.999999, 1.0])),
    top_k=st.sampled_from([0, 1, 7, top_p.CANDIDATE_COUNT, top_p.CANDIDATE_COUNT + 1, VOCABULARY]),
)
@pytest.mark.parametrize("may_wait", [True, False])
def test_it_keeps_what_ranking_all_keeps(
    may_wait: bool, shape: str, seed: int, share: float, top_k: int
) -> None:
    row = SHAPES[shape](np.random.default_rng(seed)).astype(np.float32)
    distances = row.max() - row
    far = reach(
        mx.array(distances[None]), mx.array(row[None]), top_ps=[share], top_ks=[top_k], may_wait=may_wait
    ).item()
    ours = distances <= np.float32(far)
    wanted, unsure = expected(row, share, top_k)
    assert ours[distances == 0].all(), "the likeliest token is always kept"
    wrong = (ours != wanted) & ~unsure
    assert not wrong[np.isfinite(row)].any(), (int(ours.sum()), int(wanted.sum()), int(unsure.sum()))


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


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_numbers_hurts_nobody(bad: float, may_wait: bool) -> None:
    table = logits(SHARP, SHARP)
    table[0] = bad
    params = SamplingParams(temperature=1, top_p=0.9, top_k=40)
    assert (kept(table, params, params, may_wait=may_wait)[1] == kept(table[1:], params, may_wait=True)).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_p=0.9),
        SamplingParams(temperature=1, top_k=40, top_p=0.5, min_p=0.01),
        SamplingParams(temperature=1, top_k=7, xtc_probability=1.0, xtc_threshold=0.1),
    ],
    ids=["top_p", "all", "late top_k"],
)
def test_where_nobody_waits_the_vocabulary_is_neither_sorted_nor_read(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, row = logits(FLAT), row_of(params)
    expected = sample(table, [row_of(params)], may_wait=True).item()
    used: list[str] = []

    def watch(owner: object, name: str) -> None:
        really = getattr(owner, name)

        def noted(*args: Any, **how: Any) -> Any:
            used.append(name)
            return really(*args, **how)

        monkeypatch.setattr(owner, name, noted)

    for name in ("sort", "argsort", "partition", "argpartition", "topk", "eval", "async_eval"):
        watch(mx, name)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        watch(mx.array, name)
    for name in ("array", "asarray", "sort", "partition"):
        watch(np, name)
    drawn = sample(table, [row])
    assert used == []
    monkeypatch.undo()
    assert drawn.item() == expected


FILTERS = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 40},
    "both": {"top_p": 0.5, "top_k": 40, "min_p": 1e-4},
    "late top_k": {"top_p": 0.99, "top_k": 7, "xtc_probability": 1.0, "xtc_threshold": 0.01},
}


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_logits_of_16_bits_draw_what_they_draw_in_32(
    shape: str, dtype: mx.Dtype, options: dict[str, Any]
) -> None:
    """Though fewer bits are searched; so kept are the same, of both signs and among equals."""
    table = np.stack([SHAPES[shape](np.random.default_rng(seed)) for seed in range(4)])
    table = np.where(np.isfinite(table), np.clip(table, -6e4, 6e4), table)  # float16 ends there
    half = mx.array(table.astype(np.float32)).astype(dtype)
    params = [SamplingParams(temperature=1, seed=seed, **options) for seed in range(4)]
    in_16 = filter_logits(half, [row_of(p) for p in params])
    in_32 = filter_logits(half.astype(mx.float32), [row_of(p) for p in params])
    assert in_16.dtype == dtype
    assert mx.array_equal(in_16.astype(mx.float32), in_32, equal_nan=True)
    drawn = [
        sample(logits, [row_of(p) for p in params]).tolist() for logits in (half, half.astype(mx.float32))
    ]
    assert drawn[0] == drawn[1]


def compile_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    mx.enable_compile()
    monkeypatch.setattr(top_p, "find_backend", lambda: Backend.CUDA)


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (mx.float32, "top_p", 31 * 3),
        (mx.float32, "both", 31 * 5),
        (mx.bfloat16, "top_p", 16 * 3),
        (mx.bfloat16, "top_k", 16 * 3),
        (mx.bfloat16, "both", 16 * 5),
    ],
    ids=str,
)
def test_where_kernels_are_compiled_a_search_is_few_of_them(
    dtype: mx.Dtype, options: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows there are; 197 and 321 they were, of either type."""
    compile_rounds(monkeypatch)
    params = SamplingParams(temperature=1, **FILTERS[options])
    for row_count in (1, 16):
        graph = io.StringIO()
        table = logits(*[SHARP] * row_count).astype(dtype)
        mx.eval(table)
        mx.export_to_dot(graph, filter_logits(table, [row_of(params)] * row_count))
        names = re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue())
        kernels = [name for name in names if name not in ("Broadcast", "View")]
        assert most < len(kernels) <= most + 20


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles kernels of its CPU build with g++")
@pytest.mark.parametrize(
    ("dtype", "options"), [(mx.float32, "both"), (mx.bfloat16, "top_p"), (mx.bfloat16, "top_k")], ids=str
)
def test_compiled_rounds_keep_what_plain_ones_keep(
    dtype: mx.Dtype, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1, **FILTERS[options])
    table = logits(SHARP, FLAT, 1.0).astype(dtype)
    plain = kept(table, params, params, params, may_wait=False)
    compile_rounds(monkeypatch)
    assert (kept(table, params, params, params, may_wait=False) == plain).all()
    assert 0 < plain.sum() < plain.size
