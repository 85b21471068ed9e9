"""Sharing of buffers: a cache's arrays, which may lie with those of other rows in one buffer each.

They are keys and values of unlimited context, or three arrays for each where KV is quantized. Inference
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.engine.kv_cache.cache_classes import Cache, PlainKv, QuantizedKv, class_of

_PARTS = 3
"""Of quantized numbers: themselves, and the scales and biases of their groups."""


def can_share(cache: Cache) -> bool:
    """Tell whether this is a cache of which all here is true."""
    return isinstance(class_of(cache), PlainKv)


def arrays_of(cache: Cache) -> tuple[mx.array, ...]:
    """Return what is kept of the tokens that it holds, [1, heads, tokens, width] each."""
    keys, values = cache.keys_and_values()
    return (*keys, *values) if _is_quantized(cache) else (keys, values)


def put_arrays(cache: Cache, arrays: Sequence[mx.array], *, token_count: int) -> None:
    """Have a cache hold so many tokens in such arrays, which may have room for more."""
    cache.keys, cache.values = as_fetched(cache, arrays)
    cache.offset = token_count


def as_kept(cache: Cache, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
    """Return what such a cache keeps of new tokens, [rows, heads, tokens, size]."""
    if not _is_quantized(cache):
        return keys, values
    found = [mx.quantize(each, group_size=cache.group_size, bits=cache.bits) for each in (keys, values)]
    return tuple(array for each in found for array in each)


def as_fetched(cache: Cache, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
    """Return what such arrays are to attention: keys and values."""
    if _is_quantized(cache):
        return tuple(arrays[:_PARTS]), tuple(arrays[_PARTS:])
    keys, values = arrays
    return keys, values


def _is_quantized(cache: Cache) -> bool:
    return isinstance(class_of(cache), QuantizedKv)
