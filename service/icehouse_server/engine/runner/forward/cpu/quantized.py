"""Attention to quantized KV, where MLX computes on a CPU in floats once several queries read it.

MLX's CPU build multiplies by quantized numbers one by one, for every query anew: 0.8 ns each. To make floats
of them takes 1.4 ns once, and the products are BLAS's then: forty queries on forty tokens take 0.5 ms instead
of 1.9 (8 heads of 128 numbers, 8 bits; 2-core x86, mlx 0.32.4). Inference thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention as upstream_attention

from icehouse_server.engine.attention.cpu.softmax import computes_on_cpu
from icehouse_server.engine.runner.forward.cpu.attention import Call, fused_attention

_LEAST_QUERIES: Final = 4


def quantized_attention(
    calls: Sequence[Call], *, cache: Any, scale: float, sinks: Any = None
) -> list[mx.array]:
    """Return what upstream's attention does of each call, [rows, heads, tokens, size].

    Keys and values are what caches such as `cache` give: of a QuantizedKVCache a part with the numbers, one
    with their groups' scales and one with biases, else arrays. Raises ValueError where quantized ones meet
    sinks.
    """
    in_floats = [_reads_floats(call) and sinks is None for call in calls]
    floats = [_in_floats(call, cache) for call, is_read in zip(calls, in_floats, strict=True) if is_read]
    done = iter(fused_attention(floats, scale=scale))
    return [
        next(done)
        if is_read
        else upstream_attention(q, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)
        for (q, k, v, mask), is_read in zip(calls, in_floats, strict=True)
    ]


def float_bytes(quantized_bytes: int, *, bits: int, group_size: int, number_bytes: int) -> int:
    """Return how many bytes so many of quantized KV are while they are read in floats of `number_bytes` each,
    as here; 0 where they never are."""
    if not bits or not computes_on_cpu():
        return 0
    # A group has a scale and a bias besides.
    return round(quantized_bytes * number_bytes / (bits / 8 + 2 * number_bytes / group_size))


def _reads_floats(call: Call) -> bool:
    keys: Any = call.keys
    return computes_on_cpu() and isinstance(keys, tuple) and call.queries.shape[2] >= _LEAST_QUERIES


def _in_floats(call: Call, cache: Any) -> Call:
    how = {"group_size": cache.group_size, "bits": cache.bits}
    parts: Any = (call.keys, call.values)
    keys, values = (mx.dequantize(*each, **how) for each in parts)
    return Call(call.queries, keys, values, call.mask)
