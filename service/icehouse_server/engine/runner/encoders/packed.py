"""Packed texts: several inputs one after another, as the rows of one array, without padding.

What a layer does to each token separately it does to all texts at once, so its weights are read once. Only
attention knows where a text begins and ends. So no text depends on the others, or pays for their length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx
import numpy as np

QUERY_SLICE: Final = 512
"""Queries that attend at once: the scores of a long text against itself would take more than the model."""

Turn = Callable[[mx.array], mx.array]
"""Rotates queries or keys, [texts, heads, length, size], by their positions (RoPE)."""
Bias = Callable[[mx.array], mx.array]
"""From distances, [queries, keys], positive ahead, to what is added to scores, [heads, queries, keys]."""


class PackedTexts:
    """Where each text is in arrays of [tokens, ...]. Adjacent texts of equal length attend together, so they
    come sorted by length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        ends = list(itertools.accumulate(lengths))
        self.lengths = mx.array(list(lengths))[:, None]
        """[texts, 1]."""
        self.last_tokens = mx.array(ends) - 1
        self.first_tokens = mx.array([0, *ends[:-1]])
        self.positions = mx.array(np.concatenate([np.arange(length) for length in lengths]))
        """Position of each token in its own text, [tokens]."""
        self._runs: list[tuple[int, int, int]] = []
        """Start, number and length of adjacent texts of equal length."""
        start = 0
        for length, same in itertools.groupby(lengths):
            count = sum(1 for _ in same)
            self._runs.append((start, count, length))
            start += count * length

    def sums(self, hidden: mx.array) -> mx.array:
        """Return the sum of each text's rows, [texts, size] in float32."""
        x = hidden.astype(mx.float32)
        sums = [
            mx.sum(x[start : start + count * length].reshape(count, length, -1), axis=1)
            for start, count, length in self._runs
        ]
        return mx.concatenate(sums)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        reach: int | None = None,
        turn: Turn | None = None,
        bias: Bias | None = None,
    ) -> mx.array:
        """Return the attention output of each token within its own text, [tokens, heads * size].

        The three inputs are [tokens, heads, size]; keys and values may have fewer heads. `reach` is how far a
        token sees to either side; None is everywhere.
        """
        found = []
        for start, count, length in self._runs:
            q, k, v = (
                each[start : start + count * length].reshape(count, length, *each.shape[1:]).swapaxes(1, 2)
                for each in (queries, keys, values)
            )
            if turn is not None:
                q, k = turn(q), turn(k)
            slices = [
                _attend_slice(q, k, v, begin, scale=scale, reach=reach, bias=bias)
                for begin in range(0, length, QUERY_SLICE)
            ]
            whole = mx.concatenate(slices, axis=2) if len(slices) > 1 else slices[0]
            found.append(whole.transpose(0, 2, 1, 3).reshape(count * length, -1))
        return mx.concatenate(found) if len(found) > 1 else found[0]


def _attend_slice(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    begin: int,
    *,
    scale: float,
    reach: int | None,
    bias: Bias | None,
) -> mx.array:
    """Let the queries of one slice attend to all keys that they see."""
    length = k.shape[2]
    end = min(length, begin + QUERY_SLICE)
    first, last = (0, length) if reach is None else (max(0, begin - reach), min(length, end + reach))
    distances = mx.arange(first, last)[None, :] - mx.arange(begin, end)[:, None]
    mask = None
    if bias is not None:
        mask = bias(distances).astype(q.dtype)
    elif reach is not None and reach < length - 1:
        mask = mx.abs(distances) <= reach
    return mx.fast.scaled_dot_product_attention(
        q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], scale=scale, mask=mask
    )
