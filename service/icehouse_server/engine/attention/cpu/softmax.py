"""Softmax by NumPy, where MLX computes on a CPU.

MLX's CPU build has no fused kernel: it writes the scores out, hides some with a `where` and takes their
softmax number by number, 17 ns for each where NumPy's vector instructions need 2. That is more than both
matrix products together: 64 tokens behind 900 take 250 ms in 16 layers, and 70 ms with the softmax made here
(16 heads of 64 numbers, float32; 2-core x86 with AVX-512, mlx 0.32.4).

NumPy needs the scores computed, so they are waited for while the pass is built. On a CPU its dispatch would
wait as well, but each wait costs some 50 us: few scores are left to MLX. Inference thread only.
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
"""Of a chunk: those before see less, so that nearly half of a prompt's scores are never computed."""
_MOST_SPLIT_QUERIES: Final = 64
"""That read keys in pieces: 30 behind 1,500 tokens take 85 ms in 16 layers so and 105 where the keys are
put together first, 64 take 200 either way, 128 take 500 and 320 (8 heads of 128 numbers, in turns; 2-core x86
with other work on it)."""
HIDDEN: Final = np.finfo(np.float32).min
"""Score of what is not seen, as MLX has it: a token that sees nothing at all gives no NaN."""
_LEAST_SHARED_SCORES: Final = 4 << 10
"""Of single queries, for which it is worth waking another thread."""
_SCORES_HELD: Final = 1 << 22
"""That are computed before the first of them become weights, where a layer has more than one attention."""
_SCORES_AT_ONCE: Final = 1 << 18
"""That stay in a core's own cache from one step of the softmax to the next."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Array = np.ndarray[Any, Any]


def shared(array: mx.array) -> Array:
    """Return an array's own memory: what is written there is what MLX reads."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # it is a buffer, which its stub does not say


def exponentials(scores: Floats) -> Floats:
    """Raise e to each score less the largest one of its row, in place; return the rows' sums."""
    sums = np.empty(len(scores), dtype=np.float32)
    step = max(1, _SCORES_AT_ONCE // scores.shape[1])
    for first in range(0, len(scores), step):
        part = scores[first : first + step]
        part -= part.max(axis=1, keepdims=True)
        np.exp(part, out=part)
        part.sum(axis=1, out=sums[first : first + step])
    return sums


def in_two(act: Callable[[slice, slice], None], row_count: int, head_count: int, *, is_worth: int) -> None:
    """Do it for half of the rows, or of the heads, in another thread meanwhile."""
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
    """One more thread, which sees views of computed arrays and nothing else."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="attention")


@dataclasses.dataclass(slots=True)
class ScorePart:
    """Some queries of a chunk, whose keys and values may lie in pieces."""

    first: int
    """Of the pass's tokens, the one whose query comes first."""
    scores: mx.array
    """[1, KV heads, heads of each x tokens, positions]"""
    values: Sequence[mx.array]
    shape: tuple[int, int, int, int]
    """Of the output, [1, heads, tokens, size]."""
    hidden: Bools
    """[tokens, positions]: which of the last positions, or of all, are not seen."""

    def attended(self) -> mx.array:
        """Return the output, once the scores are computed."""
        position_count = self.scores.shape[3]
        held = shared(self.scores)
        with np.errstate(all="ignore"):  # what is no number stays none
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
    """Return a chunk's attention in parts. Its tokens are the last of the positions, and the first of them is
    the pass's `first`; each sees what is before it, of a window the last positions.

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
    """Return [1, KV heads, heads of each x tokens, positions] of queries, [1, heads, tokens, size]."""
    # Heads that share keys are more rows of one matrix.
    by_head = (queries * scale).reshape(1, keys[0].shape[1], -1, queries.shape[3])
    products = [by_head @ piece.swapaxes(-1, -2) for piece in keys]
    return mx.concatenate(products, axis=-1) if len(products) > 1 else products[0]


def runs_of(parts: Sequence[ScorePart]) -> Iterator[list[ScorePart]]:
    """Give the parts in runs, each few enough for all scores of a run to be held at once."""
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
    """Return which of a chunk's tokens come behind each one of it."""
    return np.triu(np.ones((count, count), dtype=bool), 1)


def _outside(before: int, count: int, window: int) -> Bools:
    """Return which of `before + count` positions the last `count` tokens do not see."""
    asking = np.arange(before, before + count)[:, None]
    positions = np.arange(before + count)
    outside: Bools = (positions > asking) | (positions <= asking - window)
    return outside


def joined(pieces: Sequence[mx.array]) -> mx.array:
    """Return pieces of keys or values in one array."""
    return mx.concatenate(list(pieces), axis=2) if len(pieces) > 1 else pieces[0]


def weighted(weights: mx.array, values: Sequence[mx.array]) -> mx.array:
    """Return the sums of all values by their weights."""
    if len(values) == 1:
        return weights @ values[0]
    cuts = list(itertools.accumulate(piece.shape[2] for piece in values))[:-1]
    parts: Any = mx.split(weights, cuts, axis=-1)
    sums: list[mx.array] = [w @ v for w, v in zip(parts, values, strict=True)]
    return functools.reduce(operator.add, sums)
