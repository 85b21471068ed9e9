"""Attention to quantized KV, converted to floats if several queries read it.

MLX's CPU build multiplies by quantized numbers one by one, again for every query: 0.8 ns each. Converting a
number to a float takes 1.4 ns once, and then BLAS makes the products: forty queries on forty tokens take 0.5
ms instead of 1.9 (8 heads of 128 numbers, 8 bits; 2-core x86, mlx 0.32.4). Inference thread only.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.build_hooks import FIRST_WAIT
from icehouse_server.engine.attention.cpu.softmax import chunk_parts, runs_of

_LEAST_QUERIES: Final = 4
_LEAST_SCORES: Final = 1 << 14
"""Fewer scores than these cost MLX less than waiting for them would."""

Quantized = tuple[mx.array, mx.array, mx.array]
"""Numbers, [rows, KV heads, positions, packed], and the scales and biases of their groups."""


def reads_floats(queries: mx.array, keys: Any) -> bool:
    """Return whether queries, [rows, heads, tokens, size], should attend to such keys in floats."""
    has_many = isinstance(keys, tuple) and queries.shape[2] >= _LEAST_QUERIES
    return has_many and find_backend() is Backend.CPU


def attend_in_floats(
    queries: mx.array,
    keys: Quantized,
    values: Quantized,
    *,
    group_size: int,
    bits: int,
    scale: float,
    mask: Any,
) -> mx.array:
    """Return what upstream's attention would, for one row, [1, heads, tokens, size]."""
    k, v = (mx.dequantize(*parts, group_size=group_size, bits=bits) for parts in (keys, values))
    _, head_count, token_count, _ = queries.shape
    has_many = head_count * token_count * k.shape[2] >= _LEAST_SCORES
    if not (has_many and isinstance(mask, str) and queries.dtype == k.dtype == mx.float32):
        return mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask)
    outputs: list[mx.array] = []
    for together in runs_of(chunk_parts(0, queries, [k], [v], scale=scale)):
        FIRST_WAIT.come()
        mx.eval([part.scores for part in together])
        outputs += [part.attended() for part in together]
    return mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]


def float_bytes(quantized_bytes: int, *, bits: int, group_size: int, number_bytes: int) -> int:
    """Return the size of this much quantized KV once converted to floats of `number_bytes` each, as done
    here; 0 if it is never converted."""
    if not bits or find_backend() is not Backend.CPU:
        return 0
    # Each group also has a scale and a bias.
    return round(quantized_bytes * number_bytes / (bits / 8 + 2 * number_bytes / group_size))
