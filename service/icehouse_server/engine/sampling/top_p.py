"""Top-p and top-k: how far below the likeliest token a row still draws, found without ranking the vocabulary
where ranking is dear (inference thread).

A token's distance is how much its logit lies below the highest; tokens at one distance are as likely as each
other, and are kept or excluded together. What is kept is everything up to some distance: top_p asks for the
last one with less than its share of the mass before it, top_k for the last one with fewer tokens before it.

On a device that answers later this is a search by halves, over the bits of the distance: 31 masked sums, no
sort and no wait. MLX sorts a row of 262,144 logits in one block of threads on CUDA, and on Metal the first
few of them are picked by sorting all (MLX 0.32, read and not timed). Where the logits are in reach of the
host, numpy picks the first few thousand and sorts those, and all in the rare row that needs more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

CANDIDATE_COUNT = 4096
"""Tokens that are ranked first on the host."""
_DISTANCE_BITS = 31
"""A distance is a float32 without a sign, whose bits are in the order of its values."""

Distances = npt.NDArray[np.float32]


def reach(distances: mx.array, *, top_ps: Sequence[float], top_ks: Sequence[int], may_wait: bool) -> mx.array:
    """Return the farthest distance kept in each row, [rows, 1]; inf where nothing is excluded.

    `distances` is [rows, vocabulary] float32; a top_p of 1 and a top_k of 0 exclude nothing. With `may_wait`
    the distances are waited for where the host can read them in place.
    """
    if may_wait and mx.default_device() == mx.Device(mx.cpu):
        mx.eval(distances)
        table = np.array(distances, copy=False)
        with np.errstate(all="ignore"):  # a row that holds no numbers gives none, and is told by its draw
            found = [
                _ranked_reach(row, top_p=top_p, top_k=top_k)
                for row, top_p, top_k in zip(table, top_ps, top_ks, strict=True)
            ]
        return mx.array(found, dtype=mx.float32)[:, None]
    return _searched_reach(distances, top_ps=top_ps, top_ks=top_ks)


def _searched_reach(distances: mx.array, *, top_ps: Sequence[float], top_ks: Sequence[int]) -> mx.array:
    """Search for the farthest distance with less mass and fewer tokens before it than are asked for."""
    keys = distances.view(mx.int32)
    count = mx.array([[top_k or math.inf] for top_k in top_ks], dtype=mx.float32)
    has_mass, has_count = any(top_p < 1.0 for top_p in top_ps), any(top_ks)
    mass, weights = mx.zeros((len(top_ps), 1)), mx.zeros((1, 1))
    if has_mass:
        weights = mx.exp(-distances)
        share = mx.array([[top_p if top_p < 1.0 else math.inf] for top_p in top_ps], dtype=mx.float32)
        mass = share * mx.sum(weights, axis=-1, keepdims=True)
    found = mx.zeros((len(top_ps), 1), dtype=mx.int32)
    for bit in reversed(range(_DISTANCE_BITS)):
        tried = found + (1 << bit)
        is_before = keys < tried
        is_kept = mx.array(True)
        if has_mass:
            is_kept = mx.sum(mx.where(is_before, weights, 0.0), axis=-1, keepdims=True) < mass
        if has_count:
            is_kept = is_kept & (mx.sum(is_before, axis=-1, keepdims=True) < count)
        found = mx.where(is_kept, tried, found)
    # The largest key of all is a NaN's, and what is kept up to there is everything.
    is_all = found == (1 << _DISTANCE_BITS) - 1
    return mx.where(is_all, math.inf, found.view(mx.float32))


def _ranked_reach(distances: Distances, *, top_p: float, top_k: int) -> float:
    """Rank the nearest tokens of one row, more and more of them until nothing kept may be missing."""
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
    # The first with the mass is the last that is kept: before it there is less.
    kept_count = min(int(np.searchsorted(mass, wanted)) + 1, limit, len(ranked))
    return float(ranked[kept_count - 1])
