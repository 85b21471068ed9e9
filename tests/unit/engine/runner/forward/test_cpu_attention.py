"""Attention with a softmax by NumPy: what MLX's own gives, whatever is seen, and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.first_wait import FIRST_WAIT
from icehouse_server.engine.runner.forward.cpu.attention import Call, fused_attention

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
SCALE = 0.125
SIZE = 64

pytestmark = pytest.mark.skipif(not ON_CPU, reason="the device has a kernel of its own")


def call(
    tokens: int,
    positions: int,
    mask: Any = None,
    *,
    rows: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: mx.Dtype = mx.float32,
) -> Call:
    """Return an attention over random numbers, keys and values part of a longer buffer."""
    keys = [mx.random.key(n) for n in range(3)]
    queries = mx.random.normal((rows, heads, tokens, SIZE), key=keys[0]).astype(dtype)
    held = [
        mx.random.normal((rows, kv_heads, positions + 9, SIZE), key=key).astype(dtype) for key in keys[1:]
    ]
    mx.eval(queries, held)
    return Call(queries, held[0][:, :, :positions], held[1][:, :, :positions], mask)


def by_mlx(one: Call) -> mx.array:
    """Return what MLX gives."""
    q, k, v, mask = one
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask)


def truth(one: Call) -> np.ndarray:
    """Return what numbers of twice the size give."""
    q, k, v = (np.array(array, dtype=np.float64) for array in one[:3])
    heads_each = q.shape[1] // k.shape[1]
    k, v = (np.repeat(array, heads_each, axis=1) for array in (k, v))
    scores = SCALE * (q @ k.swapaxes(-1, -2))
    tokens, positions = scores.shape[2:]
    if isinstance(one.mask, str):
        seen = np.arange(positions) <= np.arange(positions - tokens, positions)[:, None]
    else:
        seen = np.array(True if one.mask is None else one.mask)
    scores = np.where(seen, scores, float(np.finfo(np.float32).min))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ v


def error(got: mx.array, one: Call) -> float:
    """Return how far from the truth a result is at most."""
    return float(np.abs(np.array(got, dtype=np.float64) - truth(one)).max())


def waits_of(act: Callable[[], Any]) -> int:
    """Return how often something waited for scores: 1 however often, 0 where all is left to MLX."""
    seen: list[None] = []
    FIRST_WAIT.expect(lambda: seen.append(None))
    act()
    FIRST_WAIT.expect(None)
    return len(seen)


def window(tokens: int, positions: int, width: int) -> mx.array:
    """Return the mask of a sliding window."""
    asking = mx.arange(positions - tokens, positions)[:, None]
    seen = mx.arange(positions)
    return (seen <= asking) & (seen > asking - width)


CALLS = {
    "one token of one row": lambda: call(1, 9000),
    "rows of one token": lambda: call(1, 700, rows=9),
    "rows of different lengths": lambda: call(
        1, 700, (mx.arange(700) < mx.array([[3], [700], [411]]))[:, None, None], rows=3, heads=16
    ),
    "a chunk behind others": lambda: call(12, 900, "causal"),
    "a chunk of which nothing was before": lambda: call(90, 90, "causal"),
    "more queries than are taken at once": lambda: call(600, 777, "causal"),
    "as many heads of keys": lambda: call(40, 200, "causal", heads=6, kv_heads=6),
    "a sliding window": lambda: call(70, 300, window(70, 300, 40)),
    "all seen": lambda: call(64, 256),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_it_gives_what_mlx_gives(make: Callable[[], Call]) -> None:
    one = make()
    got: list[mx.array] = []
    assert waits_of(lambda: got.extend(fused_attention([one], scale=SCALE))) == 1
    assert got[0].shape == one.queries.shape
    assert error(by_mlx(one), one) < 1e-4
    assert error(got[0], one) < 5e-6


def test_calls_of_one_layer_keep_their_order_and_are_waited_for_once() -> None:
    calls = [call(1, 300, rows=8), call(3, 5, "causal"), call(33, 700, "causal"), call(2, 2000, "causal")]
    got: list[mx.array] = []
    assert waits_of(lambda: got.extend(fused_attention(calls, scale=SCALE))) == 1
    assert all(error(g, one) < 5e-6 for g, one in zip(got, calls, strict=True))


def test_what_comes_before_the_first_wait_comes_once_however_many_there_are() -> None:
    calls = [call(256, 1200, heads=16), call(256, 1300, heads=16)]  # too many scores to be held together
    assert waits_of(lambda: fused_attention(calls, scale=SCALE)) == 1


@pytest.mark.parametrize(
    ("calls", "is_started"),
    [
        ([call(1, 50)], True),
        ([call(1, 50), call(1, 60)], True),
        ([call(2, 50, "causal")], True),
        ([call(1, 50, rows=3)], False),
        ([call(3, 50, "causal")], False),
        ([call(1, 50), call(16, 50, "causal")], False),
    ],
)
def test_layers_of_a_pass_of_one_or_two_tokens_begin_while_the_next_are_built(
    calls: list[Call], is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    really = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda found: (started.append(found), really(found)))
    got: list[mx.array] = []
    waits = waits_of(lambda: got.extend(fused_attention(calls, scale=SCALE)))
    assert bool(started) is is_started
    assert waits == is_started, "callers are not told of the last pass before a layer may be waited for"
    assert all(error(g, one) < 1e-4 for g, one in zip(got, calls, strict=True))


def test_a_token_that_sees_nothing_gives_what_mlx_gives() -> None:
    seen = mx.concatenate([mx.zeros((1, 400), dtype=mx.bool_), mx.ones((29, 400), dtype=mx.bool_)])
    one = call(30, 400, seen)
    (got,) = fused_attention([one], scale=SCALE)
    assert error(by_mlx(one), one) < 1e-4
    assert error(got, one) < 5e-6


def test_a_number_that_is_none_stays_in_its_row() -> None:
    one = call(1, 900, rows=8)
    want = by_mlx(one)
    queries = one.queries.at[2].multiply(float("nan"))
    (got,) = fused_attention([one._replace(queries=queries)], scale=SCALE)
    assert mx.isnan(got[2]).all()
    assert mx.allclose(got[3:], want[3:], rtol=0, atol=2e-5)
    assert mx.allclose(got[:2], want[:2], rtol=0, atol=2e-5)


def test_scores_that_no_float_holds_give_what_mlx_gives() -> None:
    one = call(16, 900, "causal")
    one = one._replace(queries=one.queries * 1e4)
    want = by_mlx(one)
    (got,) = fused_attention([one], scale=SCALE)
    assert mx.allclose(got, want, rtol=0, atol=1e-4)


OTHERS = {
    "too few scores": lambda: (call(3, 50, "causal"), None),
    "16 bits": lambda: (call(64, 400, "causal", dtype=mx.float16), None),
    "a mask that is added": lambda: (call(64, 400, mx.random.normal((64, 400))), None),
    "a mask for each head": lambda: (call(64, 400, mx.random.normal((1, 4, 64, 400)) > 0), None),
    "sinks": lambda: (call(64, 400, "causal"), mx.array([0.5, 1.0, 2.0, -1.0])),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_all_else_is_left_to_mlx(make: Callable[[], tuple[Call, mx.array | None]]) -> None:
    one, sinks = make()
    q, k, v, mask = one
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask, sinks=sinks)
    got: list[mx.array] = []
    assert waits_of(lambda: got.extend(fused_attention([one], scale=SCALE, sinks=sinks))) == 0
    assert mx.array_equal(got[0], want)


def test_what_goes_in_is_not_changed() -> None:
    one = call(64, 400, window(64, 400, 90))
    before = [mx.array(array) for array in one]
    mx.eval(before)
    mx.eval(fused_attention([one], scale=SCALE))
    assert all(mx.array_equal(a, b) for a, b in zip(one, before, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_one_query_a_head_is_read_by_numpy_and_gives_the_same(rows: int, kv_heads: int, masked: bool) -> None:
    positions = 3000
    seen = mx.arange(positions) < mx.array([positions - 700 * n for n in range(rows)])[:, None]
    one = call(1, positions, seen[:, None, None] if masked else None, rows=rows, kv_heads=kv_heads)
    (found,) = fused_attention([one], scale=SCALE)
    assert found.shape == by_mlx(one).shape
    np.testing.assert_allclose(np.array(found), truth(one), atol=2e-6)
    assert np.abs(np.array(by_mlx(one)) - truth(one)).max() < 2e-6


def test_rows_that_decode_and_a_chunk_keep_their_order() -> None:
    calls = [call(1, 2000), call(1, 90), call(20, 1500, "causal"), call(1, 3000, kv_heads=4)]
    for found, one in zip(fused_attention(calls, scale=SCALE), calls, strict=True):
        np.testing.assert_allclose(np.array(found), truth(one), atol=2e-6)


def test_a_row_that_is_damaged_harms_no_other_in_either_thread() -> None:
    one = call(1, 3000, rows=4)
    keys = np.array(one.keys)
    keys[1] = np.nan
    (found,) = fused_attention([one._replace(keys=mx.array(keys))], scale=SCALE)
    assert np.isnan(np.array(found)[1]).all()
    np.testing.assert_allclose(np.array(found)[[0, 2, 3]], truth(one)[[0, 2, 3]], atol=2e-6)
