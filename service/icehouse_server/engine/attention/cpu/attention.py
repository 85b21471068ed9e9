"""Attention over pages on a CPU: reads each page in place, and writes into the pool in place.

On MLX's CPU build an evaluated array is host memory, so the pool is a NumPy array, too. Writes are held back
until the pool is read. A layer with few scores is left to MLX, which reads the new keys beside the pages and
waits for nothing. With many scores, the layer's queries, keys and values are waited for together, once.

Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np

from icehouse_server.engine.attention.build_hooks import FIRST_WAIT
from icehouse_server.engine.attention.cpu.softmax import (
    Array,
    ScorePart,
    chunk_parts,
    joined,
    runs_of,
    scores_of,
    shared,
    weighted,
)
from icehouse_server.engine.attention.cpu.thin import ThinPlan, attend_thin
from icehouse_server.engine.attention.gather import GatherAttention, causal_rule, row_pages, runs_of_rows
from icehouse_server.engine.attention.port import AttentionCall, Ints, Pool, TokenPlaces

_LEAST_THIN_SCORES: Final = 2 << 10
"""Scores of thin queries, over all heads, from which on NumPy reads their keys. Fewer are left to MLX, which
is waited for once per pass and not in each layer: one row of 64 tokens takes 15.4 ms with MLX and 16.5 with
NumPy, one of 300 takes 18.3 either way, four of 64 take 34 and 31, sixteen 72 and 56, sixty-four 201 and 151
(CPU time of a pass, 16 layers, 8 heads of 128 numbers; 2-core x86, mlx 0.32.4)."""
_MOST_THIN_TOKENS: Final = 8
"""Tokens of a row whose queries are taken one by one: guesses, and the ends of prompts."""


_MOST_STARTED_TOKENS: Final = 2
"""Tokens of a pass whose layers begin while Python builds the next ones. One row's pass takes 12 ms this way
and 15 after 3 ms of building, two rows' 19 and 20. With more rows, the matrix products keep all cores busy by
themselves (16 layers, alternating; 2-core x86)."""


class _Write(NamedTuple):
    """Keys and values that are not in the pool yet, [tokens, KV heads, 1, head size]."""

    pool: Pool
    keys: mx.array
    values: mx.array
    places: TokenPlaces
    layer: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """Tokens [first, last) of a pass, all of one row; `begin` is the position of the first."""

    number: int
    first: int
    last: int
    begin: int

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def is_thin(self) -> bool:
        return self.count <= _MOST_THIN_TOKENS


@dataclasses.dataclass(slots=True)
class _Plan:
    """How tokens of a pass attend in all layers of one kind."""

    rows: list[_Row]
    thin_score_count: int
    """Scores of all queries that may be taken one by one, for one head."""
    thin: ThinPlan | None = None
    """The plan for these queries, once it is needed."""


class CpuAttention:
    """Implements PagedAttention for MLX's CPU build."""

    attends_to_chunks = True

    def __init__(self) -> None:
        self._unwritten: list[_Write] = []
        self._gather = GatherAttention()
        self._none = mx.zeros((1,), mx.int32)

    def write(self, pool: Pool, keys: mx.array, values: mx.array, places: TokenPlaces, *, layer: int) -> None:
        if self._unwritten and self._unwritten[-1].places is not places:
            self._flush()
        dtype = pool.shape.dtype
        if keys.dtype != dtype:
            keys, values = keys.astype(dtype), values.astype(dtype)
        self._unwritten.append(_Write(pool, keys, values, places, layer))
        if layer == pool.shape.layer_count - 1:  # the last layer to be written in a pass
            pool.order = mx.depends(self._none, [keys, values])

    def attend(
        self,
        pool: Pool,
        queries: mx.array,
        places: TokenPlaces,
        call: AttentionCall,
        new: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        if new is not None:
            self.write(pool, *new, places, layer=call.layer)
        plan = self._plan(places, queries.shape[0], call.window)
        by_numpy = call.sinks is None and queries.dtype == mx.float32 and pool.shape.dtype == mx.float32
        takes_thin = by_numpy and plan.thin_score_count * queries.shape[1] >= _LEAST_THIN_SCORES
        outputs: list[tuple[int, mx.array]] = []
        parts: list[ScorePart] = []
        for row in plan.rows:
            if takes_thin and row.is_thin:
                continue
            keys, values, low = self._pieces(pool, places, plan, row, call)
            if by_numpy and not row.is_thin:
                own = queries[row.first : row.last].swapaxes(0, 2)
                parts += chunk_parts(row.first, own, keys, values, scale=call.scale, window=call.window)
            else:
                outputs.append((row.first, _by_mlx(row, queries, keys, values, low, call)))
        if not (parts or takes_thin):
            return _started([array for _, array in outputs], queries.shape[0])
        awaited: list[mx.array] = [array for each in self._unwritten for array in (each.keys, each.values)]
        if takes_thin:
            awaited.append(queries)
        for together in list(runs_of(parts)) or [[]]:
            FIRST_WAIT.come()
            mx.eval(awaited, [part.scores for part in together])
            self._flush()
            if takes_thin:
                outputs += self._thin(pool, queries, places, plan, call)
                takes_thin = False
            awaited = []
            outputs += [(part.first, part.attended().swapaxes(0, 2)) for part in together]
        arrays = [array for _, array in sorted(outputs, key=lambda each: each[0])]
        return mx.concatenate(arrays) if len(arrays) > 1 else arrays[0]

    def gather_row(
        self, pool: Pool, places: TokenPlaces, *, row: int, layer: int, first_token: int, key_count: int
    ) -> tuple[mx.array, mx.array]:
        self._flush()
        return self._gather.gather_row(
            pool, places, row=row, layer=layer, first_token=first_token, key_count=key_count
        )

    def settle(self, pool: Pool) -> bool:
        self._flush()
        return True

    def copy_pages(self, pool: Pool, sources: Ints, targets: Ints) -> None:
        self._flush()
        held = _held(pool.array)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            held[target] = held[source]  # all at once would be copied twice

    def fill_pages(self, pool: Pool, content: mx.array, pages: Ints) -> None:
        self._flush()
        _held(pool.array)[pages] = _held(content)

    def read_pages(self, pool: Pool, pages: Ints) -> mx.array:
        self._flush()
        return pool.array[mx.array(pages)]  # the pages' holder keeps others from writing to them

    def _flush(self) -> None:
        """Put pending writes into the pool, evaluating them first."""
        unwritten, self._unwritten = self._unwritten, []
        where: tuple[Any, Any] = ((), ())
        places = None
        for pool, keys, values, now, layer in unwritten:
            if now is not places:
                places, where = now, _where(now, pool.shape.page_token_count)
            held = _held(pool.array)
            held[where[0], layer, 0, :, where[1]] = _held(keys)[:, :, 0]
            held[where[0], layer, 1, :, where[1]] = _held(values)[:, :, 0]

    def _plan(self, places: TokenPlaces, token_count: int, window: int | None) -> _Plan:
        known: _Plan | None = places.derived.get((token_count, window))
        if known is not None:
            return known
        rows = [
            _Row(int(places.rows[first]), first, last, int(places.positions[first]))
            for first, last in runs_of_rows(places.rows[:token_count])
        ]
        most = window or np.iinfo(np.int64).max
        seen = [min(row.begin + 1 + n, most) for row in rows if row.is_thin for n in range(row.count)]
        plan = places.derived[token_count, window] = _Plan(rows, sum(seen))
        return plan

    def _thin(
        self, pool: Pool, queries: mx.array, places: TokenPlaces, plan: _Plan, call: AttentionCall
    ) -> list[tuple[int, mx.array]]:
        """Return the outputs of the thin rows' tokens, in runs, each with its first token."""
        group = queries.shape[1] // pool.shape.kv_head_count
        if plan.thin is None:
            spans = [(row.first, row.last) for row in plan.rows if row.is_thin]
            size = pool.shape.page_token_count
            plan.thin = ThinPlan.of(places, spans, window=call.window, page_token_count=size, group=group)
        output = attend_thin(plan.thin, shared(pool.array)[:, call.layer], shared(queries), scale=call.scale)
        return [(first, mx.array(output[first:last])) for first, last in plan.thin.runs]

    def _pieces(
        self, pool: Pool, places: TokenPlaces, plan: _Plan, row: _Row, call: AttentionCall
    ) -> tuple[list[mx.array], list[mx.array], int]:
        """Return a row's keys and values, [1, KV heads, tokens, size] each, and the position of the first."""
        size, layer, window = pool.shape.page_token_count, call.layer, call.window
        new = next((each for each in self._unwritten if each.layer == layer and each.pool is pool), None)
        if new is None or new.places is not places:
            self._flush()
            new = None
        end = row.begin + row.count if new is None else row.begin
        low = 0 if window is None else max(0, row.begin + 1 - window)
        keys: list[mx.array] = []
        values: list[mx.array] = []
        heads, count = self._by_head(pool), pool.shape.kv_head_count
        pages = row_pages(places, row.number)
        for index in range(low // size, -(-end // size)):
            first = (int(pages[index]) * pool.shape.layer_count + layer) * 2 * count
            own = slice(max(0, low - index * size), min(size, end - index * size))
            keys.append(heads[:, first : first + count, own])
            values.append(heads[:, first + count : first + 2 * count, own])
        if new is not None:
            for pieces, array in ((keys, new.keys), (values, new.values)):
                some = array[row.first : row.last] if len(plan.rows) > 1 else array
                pieces.append(some.swapaxes(0, 2) if row.count > 1 else some)
        return keys, values, low

    def _by_head(self, pool: Pool) -> mx.array:
        """Return the pool as [1, heads of all pages and layers, page tokens, head size]. Made once per array:
        a pool that grows gets a new one."""
        if pool.view is None:
            pool.view = pool.array.reshape(1, -1, pool.shape.page_token_count, pool.shape.head_size)
            mx.eval(pool.view)
        return pool.view


def _where(places: TokenPlaces, page_token_count: int) -> tuple[Any, Any]:
    """Return each token's page and its slot there; as plain numbers for one token, which is faster."""
    pages = places.pages[places.page_starts[places.rows] + places.positions // page_token_count]
    at = places.positions % page_token_count
    return (int(pages[0]), int(at[0])) if len(pages) == 1 else (pages, at)


def _held(array: mx.array) -> Array:
    """Return an array's own memory, 16-bit numbers as integers: NumPy lacks some of these types."""
    return shared(array.view(mx.uint16) if array.dtype.size == 2 else array)


def _started(arrays: list[mx.array], token_count: int) -> mx.array:
    """Join the outputs. What is left to MLX may begin while the next layers are built."""
    output = mx.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if token_count <= _MOST_STARTED_TOKENS:
        mx.async_eval(output)  # type: ignore[no-untyped-call]
        FIRST_WAIT.come()  # starting a later layer may block until few earlier ones are left
    return output


def _by_mlx(
    row: _Row,
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    low: int,
    call: AttentionCall,
) -> mx.array:
    """Return [tokens, heads, 1, size] for a row's tokens."""
    own = queries[row.first : row.last] if len(queries) > row.count else queries
    # In 16 bits, the sums of pieces would each be rounded, and a token would differ from itself in a chunk.
    if row.count == 1 and call.sinks is None and queries.dtype == mx.float32:
        return _one_by_mlx(own, keys, values, scale=call.scale)
    k, v = joined(keys), joined(values)
    mask: Any = causal_rule(row.begin - low, row.count, call.window)
    if row.count > 1:
        own = own.swapaxes(0, 2)
    output = mx.fast.scaled_dot_product_attention(own, k, v, scale=call.scale, mask=mask, sinks=call.sinks)
    return output.swapaxes(0, 2) if row.count > 1 else output


def _one_by_mlx(
    query: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], *, scale: float
) -> mx.array:
    """Return [1, heads, 1, size] for one query, which sees all of the pieces.

    Like MLX's own attention, except that the pieces are not joined: joining 80 keys takes longer than all the
    rest (60 us for 8 heads of 128 numbers; 2-core x86, mlx 0.32.4).
    """
    weights = mx.softmax(scores_of(query, keys, scale=scale), axis=-1, precise=True)
    return weighted(weights, values).reshape(query.shape)
