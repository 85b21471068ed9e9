"""Top-p and top-k: how far below the likeliest token a row still draws (inference thread).

A token's distance is how far its logit is below the highest. Tokens at one distance are equally likely, and
are included or excluded together. A row includes everything up to some distance: for top_p, the last one with
less than the wanted mass before it; for top_k, the last one with fewer tokens before it.

On a device that runs ahead, this is a binary search over the bits of the distance: 31 masked sums, no sort
and no wait. 16-bit logits are searched by rank, in 16 sums, and include the same tokens, since sums in a
fixed order never fall as more is added. A sort would be slow: MLX sorts a row of 262,144 logits in one block
of threads on CUDA, and on Metal picks the first few by sorting all (MLX 0.32, read, not timed).

If the host can read the logits, NumPy picks and sorts the first few thousand, and all only in the rare row
that needs more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from icehouse_server.device import Backend, find_backend

CANDIDATE_COUNT = 4096
"""Tokens that the host ranks first."""
_DISTANCE_BITS = 31
"""A distance is a non-negative float32, whose bits are ordered like its value."""
_HALF_BYTES, _HALF_BITS = 2, 16
_SIGN = 1 << 15

Distances = npt.NDArray[np.float32]


def reach(
    distances: mx.array, logits: mx.array, *, top_ps: Sequence[float], top_ks: Sequence[int], may_wait: bool
) -> mx.array:
    """Return the farthest distance kept in each row, [rows, 1]; if nothing is excluded, at least the row's
    farthest.

    `distances` is [rows, vocabulary] float32, of `logits` in any float type. A top_p of 1 and a top_k of 0
    exclude nothing. With `may_wait`, the distances are waited for if the host can read them in place.
    """
    if may_wait and find_backend() is Backend.CPU:
        mx.eval(distances)
        table = np.array(distances, copy=False)
        with np.errstate(all="ignore"):  # a row of NaN gives NaN, and its draw will show it
            farthest = [
                _ranked_reach(row, top_p=top_p, top_k=top_k)
                for row, top_p, top_k in zip(table, top_ps, top_ks, strict=True)
            ]
        return mx.array(farthest, dtype=mx.float32)[:, None]
    return _searched_reach(distances, logits, top_ps=top_ps, top_ks=top_ks)


def _searched_reach(
    distances: mx.array, logits: mx.array, *, top_ps: Sequence[float], top_ks: Sequence[int]
) -> mx.array:
    """Search for the farthest distance with less mass and fewer tokens before it than the limits."""
    if logits.dtype.size == _HALF_BYTES:
        keys, bit_count = _ranks(logits), _HALF_BITS
    else:
        keys, bit_count = distances.view(mx.int32), _DISTANCE_BITS
    masses, counts = [], []
    if any(top_p < 1.0 for top_p in top_ps):
        weights = mx.exp(-distances)
        share = mx.array([[top_p if top_p < 1.0 else math.inf] for top_p in top_ps], dtype=mx.float32)
        masses.append((weights, share * mx.sum(weights, axis=-1, keepdims=True)))
    if any(top_ks):
        counts.append(mx.array([[top_k or math.inf] for top_k in top_ks], dtype=mx.float32))
    if not masses and not counts:
        return mx.full((len(top_ps), 1), math.inf)
    # MLX's CPU build would call a C++ compiler to compile it, which may not be installed.
    halve = _halve if find_backend() is Backend.CPU else _compiled_halve
    key = mx.zeros((len(top_ps), 1), dtype=keys.dtype)
    for bit in reversed(range(bit_count)):
        key = halve(key, mx.array(1 << bit, dtype=keys.dtype), keys, masses, counts)
    return mx.max(mx.where(keys <= key, distances, 0.0), axis=-1, keepdims=True)


def _halve(
    key: mx.array,
    step: mx.array,
    keys: mx.array,
    masses: Sequence[tuple[mx.array, mx.array]],
    counts: Sequence[mx.array],
) -> mx.array:
    """Return the key so far, plus a step if what comes before the new key is below the limits."""
    # Here | and + are equal, but one shared result would take a third kernel to make it for the other two.
    is_before = keys < (key | step)
    is_kept = [
        mx.sum(mx.where(is_before, weights, 0.0), axis=-1, keepdims=True) < mass for weights, mass in masses
    ]
    is_kept += [mx.sum(is_before, axis=-1, keepdims=True) < count for count in counts]
    return mx.where(functools.reduce(mx.logical_and, is_kept), key + step, key)


_compiled_halve = mx.compile(_halve)
"""Three kernels per round, or five if rows ask for both, instead of six and nine. The step is an array, since
a number would become part of the kernel, and each round would have its own."""


def _ranks(logits: mx.array) -> mx.array:
    """Return uint16 keys of 16-bit logits: the higher a logit, the lower its key.

    The bits of positive numbers are ordered like their values, those of negative numbers in reverse.
    """
    bits = logits.view(mx.uint16)
    return mx.where(bits < _SIGN, _SIGN - 1 - bits, bits)


def _ranked_reach(distances: Distances, *, top_p: float, top_k: int) -> float:
    """Rank the nearest tokens of one row, more and more of them until no kept token can be missing."""
    size = len(distances)
    if top_p >= 1.0:
        return float(np.partition(distances, top_k - 1)[top_k - 1]) if 0 < top_k < size else math.inf
    wanted = top_p * float(np.exp(-distances).sum(dtype=np.float64))
    limit = top_k or size
    ranked, mass = distances[:0], np.zeros(0)
    for count in sorted({min(CANDIDATE_COUNT, size), size}):
        nearest = np.partition(distances, count - 1)[:count] if count < size else distances
        ranked = np.sort(nearest)
        mass = np.cumsum(np.exp(-ranked), dtype=np.float64)
        if mass[-1] >= wanted or count >= limit:
            break
    # The first to reach the mass is the last one kept, since before it there is less.
    kept_count = min(int(np.searchsorted(mass, wanted)) + 1, limit, len(ranked))
    return float(ranked[kept_count - 1])
