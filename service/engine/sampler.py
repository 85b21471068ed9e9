"""Drawing the next token of every row of a batch at once (inference thread).

Each row has its own parameters and its own random key, derived from (seed, number of tokens
drawn so far) and from nothing else: a seed gives the same draws at any batch size and place.
A row's token is found by inverting the cumulative distribution at one uniform number, so a
draw costs one number a row instead of one a vocabulary entry.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import mlx.core as mx

from service.domain.request import SamplingParams

_MASK64 = (1 << 64) - 1


@dataclasses.dataclass(slots=True)
class SamplingRow:
    """One sequence's sampling state: parameters and how many tokens were drawn."""

    params: SamplingParams
    drawn_count: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        return self.params.top_p < 1.0 or self.params.top_k > 0 or self.params.min_p > 0.0


def sample(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Draw one token a row. `logits` is [rows, vocabulary], any float dtype; returns [rows] uint32, lazily.

    Advances each row's `drawn_count`.
    """
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    tokens = mx.argmax(logits, axis=-1)
    random_indices = [i for i, row in enumerate(rows) if not row.is_greedy]
    if random_indices:
        drawn_rows = [rows[i] for i in random_indices]
        everyone = len(random_indices) == len(rows)
        chosen = logits if everyone else logits[mx.array(random_indices)]
        drawn = _draw(chosen.astype(mx.float32), drawn_rows)
        if everyone:
            tokens = drawn
        else:
            tokens[mx.array(random_indices)] = drawn
    for row in rows:
        row.drawn_count += 1
    return tokens


def row_key(*, seed: int, drawn_count: int) -> tuple[int, int]:
    """Return the key's two words for draw `drawn_count` of `seed` (splitmix64, Steele et al. 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (drawn_count + 1)) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def _draw(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Invert each row's cumulative distribution at its own uniform number."""
    logits = _filter(logits, rows)
    temperatures = mx.array([[row.params.temperature] for row in rows], dtype=mx.float32)
    peak = mx.max(logits, axis=-1, keepdims=True)
    cumulative = mx.cumsum(mx.exp((logits - peak) / temperatures), axis=-1)
    keys = [row_key(seed=row.params.seed, drawn_count=row.drawn_count) for row in rows]
    uniform = mx.vmap(lambda key: mx.random.uniform(key=key))(mx.array(keys, dtype=mx.uint32))
    # A hair below the total, so that rounding never runs past the last possible token.
    target = uniform[:, None] * cumulative[:, -1:] * (1.0 - 1e-6)
    return mx.argmax(cumulative > target, axis=-1)


def _filter(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Set to -inf what top_p, min_p and top_k exclude, each judged on the distribution at temperature 1."""
    filtered_indices = [i for i, row in enumerate(rows) if row.is_filtered]
    if not filtered_indices:
        return logits
    everyone = len(filtered_indices) == len(rows)
    chosen = logits if everyone else logits[mx.array(filtered_indices)]
    kept = _keep_likely(chosen, [rows[i].params for i in filtered_indices])
    if everyone:
        return kept
    logits = logits + 0.0  # a copy: the caller's logits stay as they are
    logits[mx.array(filtered_indices)] = kept
    return logits


def _keep_likely(logits: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    vocabulary_size = logits.shape[-1]
    lowest = mx.full((len(params), 1), -math.inf)
    if any(p.top_p < 1.0 or p.top_k > 0 for p in params):
        falling = -mx.sort(-logits, axis=-1)
        weights = mx.exp(falling - falling[:, :1])
        total = mx.sum(weights, axis=-1, keepdims=True)
        mass_above = mx.cumsum(weights, axis=-1) - weights
        top_p = mx.array([[p.top_p] for p in params], dtype=mx.float32)
        top_k = mx.array([[p.top_k or vocabulary_size] for p in params])
        in_nucleus = (mass_above < top_p * total) | (top_p >= 1.0)
        kept = in_nucleus & (mx.arange(vocabulary_size)[None] < top_k)
        kept_count = mx.maximum(mx.sum(kept, axis=-1, keepdims=True), 1)
        lowest = mx.take_along_axis(falling, kept_count - 1, axis=-1)
    if any(p.min_p > 0.0 for p in params):
        floor = mx.array([[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params])
        lowest = mx.maximum(lowest, mx.max(logits, axis=-1, keepdims=True) + floor)
    return mx.where(logits < lowest, -math.inf, logits)
