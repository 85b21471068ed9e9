"""Attention to quantized KV in floats, against NumPy on the numbers that the parts stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from icehouse_server.engine.attention.build_hooks import FIRST_WAIT
from icehouse_server.engine.attention.cpu.quantized import Quantized, attend_in_floats, reads_floats

SCALE = 0.125
SIZE = 64
HOW: dict[str, Any] = {"group_size": 32, "bits": 8}

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="other devices multiply by quantized numbers"
)


class Asked(NamedTuple):
    queries: mx.array
    keys: Quantized
    values: Quantized


def asked(
    tokens: int, positions: int, *, heads: int = 4, kv_heads: int = 2, dtype: mx.Dtype = mx.float32
) -> Asked:
    """Return random queries, and keys and values of which they are the last."""
    queries, keys, values = (
        mx.random.normal((1, count, length, SIZE), key=mx.random.key(n)).astype(dtype)
        for n, (count, length) in enumerate([(heads, tokens), (kv_heads, positions), (kv_heads, positions)])
    )
    return Asked(queries, quantized(keys), quantized(values))


def quantized(array: mx.array) -> Quantized:
    numbers, scales, biases = mx.quantize(array, **HOW)
    return numbers, scales, biases


def truth(one: Asked) -> np.ndarray:
    """Return what numbers of twice the size give, each token seeing those before it."""
    q = np.array(one.queries, dtype=np.float64)
    k, v = (
        np.array(mx.dequantize(*parts, **HOW), dtype=np.float64).repeat(
            q.shape[1] // parts[0].shape[1], axis=1
        )
        for parts in one[1:]
    )
    scores = SCALE * (q @ k.swapaxes(-1, -2))
    tokens, positions = scores.shape[2:]
    hidden = np.arange(positions) > np.arange(positions - tokens, positions)[:, None]
    weights = np.exp(np.where(hidden, -np.inf, scores) - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ v


def waits_of(act: Callable[[], Any]) -> int:
    """Return how often something waited for scores: 1 however often, 0 where all is left to MLX."""
    seen: list[None] = []
    FIRST_WAIT.expect(lambda: seen.append(None))
    act()
    FIRST_WAIT.expect(None)
    return len(seen)


@pytest.mark.parametrize(
    ("one", "wait_count"),
    [
        pytest.param(asked(5, 50), 0, id="few scores"),
        pytest.param(asked(90, 90), 1, id="nothing before"),
        pytest.param(asked(12, 900), 1, id="behind others"),
        pytest.param(asked(600, 777), 1, id="more queries than are taken at once"),
        pytest.param(asked(40, 200, heads=6, kv_heads=6), 1, id="as many heads of keys"),
        pytest.param(asked(256, 1200, heads=32), 1, id="more scores than are held at once"),
    ],
)
def test_a_chunk_sees_what_is_before_each_of_its_tokens(one: Asked, wait_count: int) -> None:
    assert reads_floats(one.queries, one.keys)
    got: list[mx.array] = []
    assert (
        waits_of(lambda: got.append(attend_in_floats(*one, **HOW, scale=SCALE, mask="causal"))) == wait_count
    )
    assert got[0].shape == one.queries.shape
    np.testing.assert_allclose(np.array(got[0]), truth(one), atol=5e-6 if wait_count else 1e-4)


@pytest.mark.parametrize("is_wide", [False, True])
def test_all_else_is_left_to_mlx(is_wide: bool) -> None:
    """A mask of its own, and numbers of 16 bits."""
    one = asked(64, 400, dtype=mx.float32 if is_wide else mx.float16)
    mask: Any = mx.random.normal((64, 400)) > 0 if is_wide else "causal"
    k, v = (mx.dequantize(*parts, **HOW) for parts in one[1:])
    want = mx.fast.scaled_dot_product_attention(one.queries, k, v, scale=SCALE, mask=mask)
    got: list[mx.array] = []
    assert waits_of(lambda: got.append(attend_in_floats(*one, **HOW, scale=SCALE, mask=mask))) == 0
    assert mx.array_equal(got[0], want)


def test_few_queries_and_keys_of_numbers_are_not_for_it() -> None:
    one = asked(4, 40)
    assert reads_floats(one.queries, one.keys)
    assert not reads_floats(one.queries[:, :, :3], one.keys)
    assert not reads_floats(one.queries, mx.dequantize(*one.keys, **HOW))


def test_a_number_that_is_none_stays_with_its_token() -> None:
    one = asked(16, 900)
    queries = one.queries.at[:, :, 2].multiply(float("nan"))
    got = np.array(attend_in_floats(queries, *one[1:], **HOW, scale=SCALE, mask="causal"))
    assert np.isnan(got[:, :, 2]).all()
    others = np.delete(np.arange(16), 2)
    np.testing.assert_allclose(got[:, :, others], truth(one)[:, :, others], atol=5e-6)


def test_scores_that_no_exponential_holds_give_what_mlx_gives() -> None:
    one = asked(16, 900)
    one = one._replace(queries=one.queries * 1e4)
    k, v = (mx.dequantize(*parts, **HOW) for parts in one[1:])
    want = mx.fast.scaled_dot_product_attention(one.queries, k, v, scale=SCALE, mask="causal")
    got = attend_in_floats(*one, **HOW, scale=SCALE, mask="causal")
    assert mx.allclose(got, want, rtol=0, atol=1e-4)
