"""Trial of attention over pages: proves a backend on this device, for one model's geometry, at load.

A few passes are written and read by the backend, dispatched one behind the other without waiting, and by a
reference, which waits for each. Their answers must be alike, and their pools the same in every number: what
was written is where it belongs and nothing else has changed. The pool is a few megabytes. Inference thread.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.engine.attention.port import Ints, PagedAttention, Pool, PoolShape, TokenPlaces

_PASS_COUNT = 3
_MOST_LAYERS = 3
_LONGEST = 300
"""Tokens of the longest row: enough that its keys are split."""
_LONG_ROW = 4
_CHUNK = 4
"""Tokens that one of the rows brings in each pass."""
_TOLERANCE = 0.02
"""Of the largest number. 16-bit numbers are rounded and a reference may multiply in TF32; a key that is
missed, or seen in vain, moves far more."""
_SEED = 0


@dataclasses.dataclass(slots=True)
class _TrialPool:
    shape: PoolShape
    array: mx.array
    order: mx.array
    view: mx.array | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """How a layer attends."""

    window: int | None
    sinks: mx.array | None

    def __str__(self) -> str:
        return f"window {self.window}, {'no ' if self.sinks is None else ''}sinks"


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    places: TokenPlaces
    keys: mx.array
    values: mx.array
    queries: mx.array


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    shape: PoolShape
    content: mx.array
    """What the pool holds before."""
    passes: tuple[_Pass, ...]
    ways: tuple[_Way, ...]
    """Each layer attends in each of them."""


def prove(
    shape: PoolShape,
    query_head_count: int,
    *,
    backend: PagedAttention,
    reference: PagedAttention,
    has_sinks: bool = False,
) -> str:
    """Return why the backend must not be used for such a model on this device, "" where it is proved."""
    trial = _prepare(
        dataclasses.replace(shape, layer_count=min(shape.layer_count, _MOST_LAYERS)),
        query_head_count,
        has_sinks=has_sinks,
    )
    wanted, wanted_pool = _run(trial, reference, waits=True)
    try:
        found, pool = _run(trial, backend, waits=False)
        mx.eval(found, pool)
    except (RuntimeError, ValueError) as error:
        return f"attention over pages failed: {error}"
    if not all(mx.array_equal(*each).item() for each in zip(pool, wanted_pool, strict=True)):
        return "the pages hold other numbers than what was written"
    for index, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        highest, apart = _largest(right), _largest(mine.astype(mx.float32) - right.astype(mx.float32))
        if not apart <= _TOLERANCE * highest:  # also where it is not a number
            way = trial.ways[index % len(trial.ways)]
            return f"attention over pages ({way}) is off by {apart:.3g} of {highest:.3g}"
    return ""


def _largest(numbers: mx.array) -> float:
    return float(mx.abs(numbers.astype(mx.float32)).max().item())  # type: ignore[arg-type]


def _run(trial: _Trial, backend: PagedAttention, *, waits: bool) -> tuple[list[mx.array], list[mx.array]]:
    """Return the answers of all passes, and the pool's numbers after them: all, and the long row's."""
    shape = trial.shape
    pool = _TrialPool(shape, mx.zeros(trial.content.shape, shape.dtype), mx.zeros((1,), mx.int32))
    mx.eval(pool.array, pool.order)
    everything = np.arange(trial.content.shape[0], dtype=np.int32)
    backend.fill_pages(pool, trial.content, everything)
    backend.copy_pages(pool, everything[:1], everything[-1:])
    answers: list[mx.array] = []
    for is_one_launch, each in zip(itertools.cycle((True, False)), trial.passes, strict=False):
        found: list[mx.array] = []
        for layer in range(shape.layer_count):
            found.extend(_answers(trial, backend, pool, each, layer, is_one_launch=is_one_launch))
        mx.async_eval(found, pool.order)  # type: ignore[no-untyped-call]
        if waits:
            mx.eval(found, pool.order)
        answers.extend(found)
    whole = backend.read_pages(pool, everything)
    size, last = shape.page_token_count, shape.layer_count - 1
    # Without its first page, and some tokens more than it has.
    row = backend.gather_row(
        pool,
        trial.passes[-1].places,
        row=_LONG_ROW,
        layer=last,
        first_token=size,
        key_count=_LONGEST + size,
    )
    return answers, [whole, *row]


def _answers(
    trial: _Trial, backend: PagedAttention, pool: Pool, one: _Pass, layer: int, *, is_one_launch: bool
) -> Iterator[mx.array]:
    """Write and attend in each way; the first of them in the launch that writes, where that is wanted."""
    if not is_one_launch:
        backend.write(pool, one.keys, one.values, one.places, layer=layer)
    for way in trial.ways:
        named: dict[str, Any] = {
            "layer": layer,
            "scale": trial.shape.head_size**-0.5,
            "window": way.window,
            "sinks": way.sinks,
        }
        if is_one_launch and way is trial.ways[0]:
            yield backend.write_and_attend(pool, one.queries, one.keys, one.values, one.places, **named)
        else:
            yield backend.attend(pool, one.queries, one.places, **named)


def _prepare(shape: PoolShape, query_head_count: int, *, has_sinks: bool) -> _Trial:
    random = np.random.default_rng(_SEED)

    def normal(*sizes: int) -> mx.array:
        return mx.array(random.standard_normal(sizes, np.float32)).astype(shape.dtype)

    rows, begins, counts = _rows(shape.page_token_count)
    kv_heads, size = shape.kv_head_count, shape.head_size
    passes = []
    for step in range(_PASS_COUNT):
        places = _places(rows, [b + step * n for b, n in zip(begins, counts, strict=True)], counts)
        token_count = places.token_count
        keys, values = (normal(token_count, kv_heads, 1, size) for _ in range(2))
        passes.append(_Pass(places, keys, values, normal(token_count, query_head_count, 1, size)))
    page_count = 1 + max(max(pages) for pages in rows)
    content = normal(page_count, shape.layer_count, 2, kv_heads, shape.page_token_count, size)
    window = shape.page_token_count + shape.page_token_count // 2
    sinks = [None, normal(query_head_count)] if has_sinks else [None]
    return _Trial(
        shape, content, tuple(passes), tuple(_Way(each, sink) for each in (None, window) for sink in sinks)
    )


def _rows(page: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Return rows' pages, the position at which each goes on, and how many tokens it brings in each pass.

    A row's first token; one that comes to a page's end; one that shares the first page of another; a chunk
    across a page's border; a long one, which ends in the page that is a copy.
    """
    counts = [1, 1, 1, _CHUNK, 1]
    begins = [0, page - 1, page, max(page, 2 * page - 2), -(-_LONGEST // page) * page]
    shared, unused = 0, itertools.count(1)
    rows = []
    for begin, count, first in zip(begins, counts, ([], [], [shared], [shared], []), strict=True):
        page_count = -(-(begin + _PASS_COUNT * count) // page)
        rows.append([*first, *itertools.islice(unused, page_count - len(first))])
    return rows, begins, counts


def _places(rows: list[list[int]], begins: list[int], counts: list[int]) -> TokenPlaces:
    starts = np.cumsum([0, *(len(pages) for pages in rows[:-1])], dtype=np.int32)
    pages: Ints = np.array([number for each in rows for number in each], np.int32)
    numbers: Ints = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions: Ints = np.concatenate(
        [np.arange(b, b + n, dtype=np.int32) for b, n in zip(begins, counts, strict=True)]
    )
    return TokenPlaces(pages, starts, numbers, positions)
