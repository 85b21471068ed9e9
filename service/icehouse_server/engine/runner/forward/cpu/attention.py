"""Attention with a softmax by NumPy, where MLX computes on a CPU.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
import numpy as np

_LEAST_THIN_SCORES: Final = 1 << 12
"""The same where each head has one query: MLX's matrix product of a vector copies all keys first."""
_LEAST_SHARED_SCORES: Final = 1 << 13
"""Of such ones, for which it is worth waking another thread."""
_LEAST_SCORES: Final = 1 << 14
"""Fewer scores than these cost MLX less than it takes to wait for them."""
_LEAST_SCORES_BESIDE: Final = 1 << 12
"""The same of what is waited for anyway."""
_QUERIES_AT_ONCE: Final = 256
"""Of a chunk: those before see less, so that nearly half of a prompt's scores are never computed."""
_SCORES_HELD: Final = 1 << 22
"""That are computed before the first of them become weights, where a layer has more than one attention."""
_SCORES_AT_ONCE: Final = 1 << 18
"""That stay in a core's own cache from one step of the softmax to the next."""
_HIDDEN: Final = np.finfo(np.float32).min
"""Score of what is not seen, as MLX has it: a token that sees nothing at all gives no NaN."""

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class FirstWait:
    """What is to be done once, just before a pass is waited for the first time."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None

    def expect(self, act: Callable[[], None] | None) -> None:
        """Know what to do before the pass that is built next."""
        self._act = act

    def come(self) -> None:
        """Do it, unless it is done."""
        act, self._act = self._act, None
        if act is not None:
            act()


FIRST_WAIT: Final = FirstWait()
"""Of the pass being built, which one thread builds."""


class Call(NamedTuple):
    """One attention of a layer."""

    queries: mx.array
    """[rows, heads, tokens, size]"""
    keys: mx.array
    """[rows, KV heads, positions, size], and so are the values."""
    values: mx.array
    mask: Any = None
    """None, "causal" or an array that broadcasts to [rows, heads, tokens, positions]."""


def fused_attention(calls: Sequence[Call], *, scale: float, sinks: Any = None) -> list[mx.array]:
    """Return what `mx.fast.scaled_dot_product_attention` does of each call, [rows, heads, tokens, size].

    Where softmax is made here, all of a layer are waited for together.
    """
    counts = [_score_count(call) for call in calls] if _is_cpu() and sinks is None else []
    least = _LEAST_SCORES_BESIDE if max(counts, default=0) >= _LEAST_SCORES else None
    thin_counts = [count for call, count in zip(calls, counts, strict=False) if call.queries.shape[2] == 1]
    takes_thin = sum(thin_counts) >= _LEAST_THIN_SCORES
    outputs: list[mx.array | None] = []
    parts: list[_Part | _ThinPart] = []
    for i, call in enumerate(calls):
        if takes_thin and counts[i] and call.queries.shape[2] == 1:
            outputs.append(None)
            parts.append(_ThinPart(i, call, scale))
        elif least is not None and counts[i] >= least:
            outputs.append(None)
            parts += _parts(i, call, scale)
        else:
            q, k, v, mask = call
            outputs.append(mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks))
    found: dict[int, list[mx.array]] = {}
    for together in _runs(parts):
        FIRST_WAIT.come()
        mx.eval([part.awaited for part in together])
        for part in together:
            found.setdefault(part.number, []).append(part.attended())
    for i, pieces in found.items():
        outputs[i] = mx.concatenate(pieces, axis=2) if len(pieces) > 1 else pieces[0]
    return cast(list[mx.array], outputs)


def _score_count(call: Call) -> int:
    """Return how many scores a call has; 0 where it is left to MLX."""
    queries, keys, _, mask = call
    if queries.dtype != mx.float32 or keys.dtype != mx.float32:
        return 0
    if not (mask is None or isinstance(mask, str)) and (
        mask.dtype != mx.bool_ or not (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))
    ):
        return 0
    row_count, head_count, token_count, _ = queries.shape
    return row_count * head_count * token_count * int(keys.shape[2])


@functools.cache
def _is_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


@functools.lru_cache(maxsize=64)
def _later(count: int) -> Bools:
    """Return which of a chunk's tokens come behind each one of it."""
    return np.triu(np.ones((count, count), dtype=bool), 1)


@dataclasses.dataclass(slots=True)
class _Part:
    """Some queries of one call."""

    number: int
    """Of the call."""
    scores: mx.array
    """[rows, KV heads, heads of each x tokens, positions]"""
    values: mx.array
    shape: tuple[int, int, int, int]
    """Of the output."""
    hidden: Bools | mx.array | None
    """[.., tokens, positions]: which of the last positions, or of all, are not seen. MLX's array says which
    are."""

    @classmethod
    def of(cls, number: int, call: Call, scale: float, hidden: Any) -> _Part:
        row_count, head_count, token_count, size = call.queries.shape
        # Heads that share keys are more rows of one matrix.
        queries = (call.queries * scale).reshape(row_count, call.keys.shape[1], -1, size)
        shape = (row_count, head_count, token_count, call.values.shape[3])
        return cls(number, queries @ call.keys.swapaxes(-1, -2), call.values, shape, hidden)

    @property
    def awaited(self) -> mx.array:
        return self.scores

    @property
    def held_count(self) -> int:
        """Scores that are there before the softmax."""
        return int(self.scores.size)

    def attended(self) -> mx.array:
        """Return the output, once the scores are computed."""
        row_count, head_count, token_count, _ = self.shape
        kv_head_count, position_count = self.scores.shape[1], self.scores.shape[3]
        held = _shared(self.scores)
        with np.errstate(all="ignore"):  # what is no number stays none
            if self.hidden is not None:
                hidden = ~_shared(self.hidden) if isinstance(self.hidden, mx.array) else self.hidden
                by_head = (row_count, kv_head_count, head_count // kv_head_count, token_count, position_count)
                where = hidden[:, None] if hidden.ndim == 4 else hidden
                np.copyto(held.reshape(by_head)[..., -hidden.shape[-1] :], _HIDDEN, where=where)
            sums = _exponentials(held.reshape(-1, position_count))
        weighted = self.scores @ self.values
        return (weighted / mx.array(sums.reshape(*held.shape[:3], 1))).reshape(self.shape)


class _ThinPart:
    """One query for each head of some rows: read by NumPy, which multiplies by a vector without a copy.

    A row of 1,530 tokens takes 13 ms in 16 layers instead of 34, one of 120 takes 0.8 instead of 2.2 (8 heads
    of 128 numbers, float32; 2-core x86, mlx 0.32.4).
    """

    held_count = 0

    def __init__(self, number: int, call: Call, scale: float) -> None:
        self.number = number
        self._scale = scale
        self._call = call

    @property
    def awaited(self) -> list[mx.array]:
        """What is to be computed before it is read."""
        queries, keys, values, mask = self._call
        return [queries, keys, values, *([mask] if isinstance(mask, mx.array) else [])]

    def attended(self) -> mx.array:
        """Return the output, once what it reads is computed."""
        call = self._call
        queries, keys, values = _shared(call.queries), _shared(call.keys), _shared(call.values)
        row_count, head_count, _, size = queries.shape
        kv_head_count, position_count = keys.shape[1:3]
        grouped = queries.reshape(row_count, kv_head_count, head_count // kv_head_count, size)
        seen = None
        if isinstance(call.mask, mx.array):
            seen = np.broadcast_to(_shared(call.mask), (row_count, 1, 1, position_count))[:, 0]
        output = np.empty((*grouped.shape[:3], values.shape[3]), dtype=np.float32)

        def attend(rows: slice, heads: slice) -> None:
            k, q = keys[rows, heads], grouped[rows, heads] * np.float32(self._scale)
            with np.errstate(all="ignore"):  # what is no number stays none
                if q.shape[2] == 1:
                    scores = np.matmul(k, q[:, :, 0, :, None])[:, :, None, :, 0]
                else:
                    scores = np.matmul(q, k.swapaxes(-1, -2))
                if seen is not None:
                    np.copyto(scores, _HIDDEN, where=~seen[rows, :, None])
                sums = _exponentials(scores.reshape(-1, position_count))
                weighted = np.matmul(scores, values[rows, heads])
                output[rows, heads] = weighted / sums.reshape(*scores.shape[:3], 1)

        _in_two(attend, row_count, kv_head_count, is_worth=position_count * head_count * row_count)
        return mx.array(output.reshape(row_count, head_count, 1, -1))


def _in_two(act: Callable[[slice, slice], None], row_count: int, head_count: int, *, is_worth: int) -> None:
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


def _parts(number: int, call: Call, scale: float) -> list[_Part]:
    if not isinstance(call.mask, str):
        return [_Part.of(number, call, scale, call.mask)]
    count = call.queries.shape[2]
    before = call.keys.shape[2] - count
    found = []
    for first in range(0, count, _QUERIES_AT_ONCE):
        last = min(count, first + _QUERIES_AT_ONCE)
        seen = slice(0, before + last)
        some = Call(call.queries[:, :, first:last], call.keys[:, :, seen], call.values[:, :, seen])
        found.append(_Part.of(number, some, scale, _later(last - first)))
    return found


def _runs(parts: Sequence[_Part | _ThinPart]) -> Iterator[list[_Part | _ThinPart]]:
    """Give the parts in runs, each few enough for all scores of a run to be held at once."""
    run: list[_Part | _ThinPart] = []
    for part in parts:
        if run and sum(each.held_count for each in (*run, part)) > _SCORES_HELD:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _shared(array: mx.array) -> np.ndarray[Any, Any]:
    """Return an array's own memory: what is written there is what MLX reads."""
    return np.asarray(memoryview(array))  # type: ignore[arg-type]  # it is a buffer, which its stub does not say


def _exponentials(scores: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Raise e to each score less the largest one of its row, in place; return the rows' sums."""
    sums = np.empty(len(scores), dtype=np.float32)
    step = max(1, _SCORES_AT_ONCE // scores.shape[1])
    for first in range(0, len(scores), step):
        part = scores[first : first + step]
        part -= part.max(axis=1, keepdims=True)
        np.exp(part, out=part)
        part.sum(axis=1, out=sums[first : first + step])
    return sums
