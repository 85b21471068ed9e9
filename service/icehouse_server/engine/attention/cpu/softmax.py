"""Softmax by NumPy, for MLX's CPU build.

MLX's CPU build has no fused kernel: it writes the scores out, hides some with a `where` and takes their
softmax number by number, at 17 ns each, where NumPy's vector instructions need 2. That is more than both
matrix products together: 64 tokens after 900 take 250 ms in 16 layers, and 70 ms with the softmax here (16
heads of 64 numbers, float32; 2-core x86 with AVX-512, mlx 0.32.4).

NumPy needs computed scores, so they are waited for while the pass is built. Dispatching on a CPU would wait
as well, but each wait costs some 50 us, so few scores are left to MLX. Inference thread only.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

_QUERIES_AT_ONCE: Final = 256
"""Queries of a chunk per part. Earlier ones see less, so nearly half of the scores are never computed."""
_MOST_SPLIT_QUERIES: Final = 64
"""Most queries that read keys in pieces. In 16 layers, 30 after 1,500 tokens take 85 ms this way, and 105 if
the keys are joined first; 64 take 200 either way, 128 take 500 and 320 (8 heads of 128 numbers, alternating;
2-core x86 with other work on it)."""
HIDDEN: Final = np.finfo(np.float32).min
"""Score of a hidden position, as in MLX: a token that sees nothing at all gives no NaN."""
_LEAST_SHARED_SCORES: Final = 4 << 10
"""Scores of single queries from which on it is worth waking another thread."""
_SCORES_HELD: Final = 1 << 22
"""Scores computed before the first of them become weights, if a layer has more than one attention."""
_SCORES_AT_ONCE: Final = 1 << 18
"""Scores that stay in a core's own cache from one step of the softmax to the next."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Array = np.ndarray[Any, Any]


def shared(array: mx.array) -> Array:
    """Return an array's own memory: MLX reads what is written there."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # a buffer, though its stub does not say so


def exponentials(scores: Floats) -> Floats:
    """Replace each score, in place, by e to its difference from its row's maximum; return the rows' sums."""
    sums = np.empty(len(scores), dtype=np.float32)
    step = max(1, _SCORES_AT_ONCE // scores.shape[1])
    for first in range(0, len(scores), step):
        part = scores[first : first + step]
        part -= part.max(axis=1, keepdims=True)
        np.exp(part, out=part)
        part.sum(axis=1, out=sums[first : first + step])
    return sums


def in_two(act: Callable[[slice, slice], None], row_count: int, head_count: int, *, is_worth: int) -> None:
    """Run `act` on half of the rows, or of the heads, in another thread, and on the rest here."""
    every = slice(None)
    if is_worth < _LEAST_SHARED_SCORES or max(row_count, head_count) < 2:
        act(every, every)
        return
    middle = row_count // 2 if row_count > 1 else head_count // 2
    halves = (slice(0, middle), slice(middle, None))
    first, second = ((half, every) if row_count > 1 else (every, half) for half in halves)
    other = _helper().submit(act, *first)
    act(*second)
    other.result()


@functools.cache
def _helper() -> concurrent.futures.ThreadPoolExecutor:
    """A second thread, which sees nothing but views of computed arrays."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="attention")


@dataclasses.dataclass(slots=True)
class ScorePart:
    """Some queries of a chunk, whose keys and values may be in pieces."""

    first: int
    """The pass's token that has the first query."""
    scores: mx.array
    """[1, KV heads, heads of each x tokens, positions]"""
    values: Sequence[mx.array]
    shape: tuple[int, int, int, int]
    """Shape of the output, [1, heads, tokens, size]."""
    hidden: Bools
    """[tokens, positions]: which of the last positions, or of all, are hidden."""

    def attended(self) -> mx.array:
        """Return the output, once the scores are computed."""
        position_count = self.scores.shape[3]
        held = shared(self.scores)
        with np.errstate(all="ignore"):  # NaN stays NaN
            by_token = held.reshape(-1, self.shape[2], position_count)
            np.copyto(by_token[..., -self.hidden.shape[-1] :], HIDDEN, where=self.hidden)
            sums = exponentials(held.reshape(-1, position_count))
        sums_of_values = weighted(self.scores, self.values)
        return (sums_of_values / mx.array(sums.reshape(*held.shape[:3], 1))).reshape(self.shape)


def chunk_parts(
    first: int,
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    *,
    scale: float,
    window: int | None = None,
) -> list[ScorePart]:
    """Return a chunk's attention in parts. Its tokens are at the last positions, and the first of them is
    token `first` of the pass. Each token sees the positions up to its own, or the last ones in a window.

    `queries`: [1, heads, tokens, size]. `keys`, `values`: pieces of [1, KV heads, positions, size].
    """
    count = queries.shape[2]
    if count > _MOST_SPLIT_QUERIES:
        keys, values = [joined(keys)], [joined(values)]
    before = sum(piece.shape[2] for piece in keys) - count
    parts: list[ScorePart] = []
    for start in range(0, count, _QUERIES_AT_ONCE):
        stop = min(count, start + _QUERIES_AT_ONCE)
        some_keys, some_values, begin = keys, values, 0
        if len(keys) == 1:
            begin = 0 if window is None else max(0, before + start + 1 - window)
            some_keys, some_values = ([each[0][:, :, begin : before + stop]] for each in (keys, values))
        hidden = _later(stop - start)
        if window is not None:
            hidden = _outside(before + start - begin, stop - start, window)
        scores = scores_of(queries[:, :, start:stop], some_keys, scale=scale)
        shape = (1, queries.shape[1], stop - start, values[0].shape[3])
        parts.append(ScorePart(first + start, scores, some_values, shape, hidden))
    return parts


def scores_of(queries: mx.array, keys: Sequence[mx.array], *, scale: float) -> mx.array:
    """Return [1, KV heads, heads of each x tokens, positions] for queries, [1, heads, tokens, size]."""
    # Heads that share keys become more rows of one matrix.
    by_head = (queries * scale).reshape(1, keys[0].shape[1], -1, queries.shape[3])
    products = [by_head @ piece.swapaxes(-1, -2) for piece in keys]
    return mx.concatenate(products, axis=-1) if len(products) > 1 else products[0]


def runs_of(parts: Sequence[ScorePart]) -> Iterator[list[ScorePart]]:
    """Yield the parts in runs, each small enough for all its scores to be held at once."""
    run: list[ScorePart] = []
    for part in parts:
        if run and sum(each.scores.size for each in (*run, part)) > _SCORES_HELD:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


@functools.lru_cache(maxsize=64)
def _later(count: int) -> Bools:
    """Return which tokens of a chunk come after each of its tokens."""
    return np.triu(np.ones((count, count), dtype=bool), 1)


def _outside(before: int, count: int, window: int) -> Bools:
    """Return which of `before + count` positions the last `count` tokens do not see."""
    asking = np.arange(before, before + count)[:, None]
    positions = np.arange(before + count)
    outside: Bools = (positions > asking) | (positions <= asking - window)
    return outside


def joined(pieces: Sequence[mx.array]) -> mx.array:
    """Return pieces of keys or values as one array."""
    return mx.concatenate(list(pieces), axis=2) if len(pieces) > 1 else pieces[0]


def weighted(weights: mx.array, values: Sequence[mx.array]) -> mx.array:
    """Return the sums of all values, weighted."""
    if len(values) == 1:
        return weights @ values[0]
    cuts = list(itertools.accumulate(piece.shape[2] for piece in values))[:-1]
    parts: Any = mx.split(weights, cuts, axis=-1)
    sums: list[mx.array] = [w @ v for w, v in zip(parts, values, strict=True)]
    return functools.reduce(operator.add, sums)
