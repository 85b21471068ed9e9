"""Attention of rows with caches of their own, with a softmax by NumPy where MLX computes on a CPU.

Few scores are left to MLX. Inference thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import mlx.core as mx
import numpy as np

from icehouse_server.engine.attention.cpu.softmax import (
    HIDDEN,
    MOST_STARTED_TOKENS,
    QUERIES_AT_ONCE,
    Part,
    computes_on_cpu,
    exponentials,
    in_two,
    later,
    runs_of,
    shared,
)
from icehouse_server.engine.attention.first_wait import FIRST_WAIT

_LEAST_THIN_SCORES: Final = 6 << 10
"""Of one query for each head, from which on their keys are read here: MLX's matrix product of a vector copies
all keys first, but is waited for once a pass and not in each layer. Sixteen rows of 40 to 90 tokens take 38
ms a pass so and 44 by MLX, eight of 120 to 160 tokens 36 and 39, eight of 40 to 90 tokens 31 either way (16
layers, 8 heads of 128 numbers, in turns; 2-core x86)."""
_LEAST_THIN_POSITIONS: Final = 1 << 10
"""The same of one row, whatever the others have: a head's keys and their copy are more than a core's own
cache holds then. One row of 1,200 tokens takes 34 ms and 44 by MLX, of 800 tokens 26 and 24."""
_LEAST_SCORES: Final = 1 << 14
"""Fewer scores than these cost MLX less than it takes to wait for them."""
_LEAST_SCORES_BESIDE: Final = 1 << 12
"""The same of what is waited for anyway."""


class Call(NamedTuple):
    """One attention of a layer."""

    queries: mx.array
    """[rows, heads, tokens, size]"""
    keys: mx.array
    """[rows, KV heads, positions, size], and so are the values. Quantized ones are in parts, which
    `quantized` reads."""
    values: mx.array
    mask: Any = None
    """None, "causal" or an array that broadcasts to [rows, heads, tokens, positions]."""


def fused_attention(calls: Sequence[Call], *, scale: float, sinks: Any = None) -> list[mx.array]:
    """Return what `mx.fast.scaled_dot_product_attention` does of each call, [rows, heads, tokens, size].

    Where softmax is made here, all of a layer are waited for together.
    """
    counts = [_score_count(call) for call in calls] if computes_on_cpu() and sinks is None else []
    least = _LEAST_SCORES_BESIDE if max(counts, default=0) >= _LEAST_SCORES else None
    thin = [(call, count) for call, count in zip(calls, counts, strict=False) if call.queries.shape[2] == 1]
    takes_thin = (
        sum(count for _, count in thin) >= _LEAST_THIN_SCORES
        or max((int(call.keys.shape[2]) for call, count in thin if count), default=0) >= _LEAST_THIN_POSITIONS
    )
    outputs: list[mx.array | None] = []
    parts: list[_AnyPart] = []
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
    for together in runs_of(parts):
        FIRST_WAIT.come()
        mx.eval([part.awaited for part in together])
        for part in together:
            for number, array in zip(part.numbers, part.attended(), strict=True):
                found.setdefault(number, []).append(array)
    for i, pieces in found.items():
        outputs[i] = mx.concatenate(pieces, axis=2) if len(pieces) > 1 else pieces[0]
    if computes_on_cpu() and not found and _token_count(calls) <= MOST_STARTED_TOKENS:
        mx.async_eval(outputs)  # type: ignore[no-untyped-call]
        FIRST_WAIT.come()  # a later layer is begun only once few before it are left, which may take long
    return cast(list[mx.array], outputs)


def _is_known(mask: Any) -> bool:
    """Whether a mask is one that scores are hidden by here."""
    if mask is None or isinstance(mask, str):
        return True
    return bool(mask.dtype == mx.bool_) and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))


def _score_count(call: Call) -> int:
    """Return how many scores a call has; 0 where it is left to MLX."""
    queries, keys, _, mask = call
    if queries.dtype != mx.float32 or keys.dtype != mx.float32 or not _is_known(mask):
        return 0
    row_count, head_count, token_count, _ = queries.shape
    return row_count * head_count * token_count * int(keys.shape[2])


def _token_count(calls: Sequence[Call]) -> int:
    return sum(call.queries.shape[0] * call.queries.shape[2] for call in calls)


class _ThinPart:
    """One query for each head of some rows: read by NumPy, which multiplies by a vector without a copy.

    A row of 1,530 tokens takes 13 ms in 16 layers instead of 34 (8 heads of 128 numbers, float32; 2-core x86,
    mlx 0.32.4).
    """

    held_count = 0

    def __init__(self, number: int, call: Call, scale: float) -> None:
        self.numbers = (number,)
        self._scale = scale
        self._call = call

    @property
    def awaited(self) -> list[mx.array]:
        """What is to be computed before it is read."""
        queries, keys, values, mask = self._call
        return [queries, keys, values, *([mask] if isinstance(mask, mx.array) else [])]

    def attended(self) -> list[mx.array]:
        """Return the output, once what it reads is computed."""
        call = self._call
        queries, keys, values = (shared(each) for each in call[:3])
        row_count, head_count, _, size = queries.shape
        kv_head_count, position_count = keys.shape[1:3]
        grouped = queries.reshape(row_count, kv_head_count, head_count // kv_head_count, size)
        seen = None
        if isinstance(call.mask, mx.array):
            seen = np.broadcast_to(shared(call.mask), (row_count, 1, 1, position_count))[:, 0]
        output = np.empty((*grouped.shape[:3], values.shape[3]), dtype=np.float32)

        def attend(rows: slice, heads: slice) -> None:
            k, q = keys[rows, heads], grouped[rows, heads] * np.float32(self._scale)
            with np.errstate(all="ignore"):  # what is no number stays none
                if q.shape[2] == 1:
                    scores = np.matmul(k, q[:, :, 0, :, None])[:, :, None, :, 0]
                else:
                    scores = np.matmul(q, k.swapaxes(-1, -2))
                if seen is not None:
                    np.copyto(scores, HIDDEN, where=~seen[rows, :, None])
                sums = exponentials(scores.reshape(-1, position_count))
                weighted = np.matmul(scores, values[rows, heads])
                output[rows, heads] = weighted / sums.reshape(*scores.shape[:3], 1)

        in_two(attend, row_count, kv_head_count, is_worth=position_count * head_count * row_count)
        return [mx.array(output.reshape(row_count, head_count, 1, -1))]


_AnyPart = Part | _ThinPart


def _part(number: int, call: Call, scale: float, hidden: Any) -> Part:
    return Part.of(number, call.queries, (call.keys,), (call.values,), scale=scale, hidden=hidden)


def _parts(number: int, call: Call, scale: float) -> list[Part]:
    if not isinstance(call.mask, str):
        return [_part(number, call, scale, call.mask)]
    count = call.queries.shape[2]
    before = call.keys.shape[2] - count
    found = []
    for first in range(0, count, QUERIES_AT_ONCE):
        last = min(count, first + QUERIES_AT_ONCE)
        queries, keys, values = call.queries[:, :, first:last], call.keys, call.values
        if last < count:
            keys, values = keys[:, :, : before + last], values[:, :, : before + last]
        some = Call(queries, keys, values)
        found.append(_part(number, some, scale, later(last - first)))
    return found
