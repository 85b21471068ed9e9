"""Choice of the backend that attends to pages on this device. A backend is used only after a trial at load
has proved it for the model's geometry.

In the trial the backend runs a few passes, dispatched one after the other without waiting, and a reference
runs the same passes and waits for each. Outputs must be close and pools equal in every number: everything
written is in its place and nothing else changed. The pool is a few megabytes. The trial took 0.4 s for layers
of eight KV heads of 128 on two x86 cores, so it is a generator: other work goes on between its parts.
Inference thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Generator, Iterable, Iterator

import mlx.core as mx
import numpy as np

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.attention.cpu.attention import CpuAttention
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.gpu.launch import gpu_attentions
from icehouse_server.engine.attention.port import (
    AttentionCall,
    PagedAttention,
    Pool,
    PoolShape,
    TokenPlaces,
)

_log = logging.getLogger("icehouse.engine")

_CUDNN_HEAD_SIZE_LIMIT = 128
"""What cuDNN supports as of MLX 0.32, in 16 bits; the head size must be a multiple of 8."""

_PASS_COUNT = 3
_MOST_LAYERS = 3
_LONGEST = 300
"""Tokens of the longest row: enough that its keys are split."""
_LONG_ROW = 4
_CHUNK = 4
"""Tokens that one of the rows adds in each pass."""
_TOLERANCE = 0.02
"""Relative to the largest number. 16-bit numbers are rounded and a reference may multiply in TF32. A key that
is missed, or attended to wrongly, changes the result far more."""
_SEED = 0


def shapes_are_costly(shape: PoolShape) -> bool:
    """Return whether the first attention of each shape waits for a plan to be built, as with cuDNN."""
    is_cudnn = shape.dtype.size == 2 and shape.head_size <= _CUDNN_HEAD_SIZE_LIMIT
    return is_cudnn and shape.head_size % 8 == 0 and find_backend() is Backend.CUDA


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry that kernels are proved for."""

    shape: PoolShape
    query_head_count: int
    has_sinks: bool


def kernels_for(
    shape: PoolShape, *, query_head_count: int, has_sinks: bool, proved: dict[Geometry, int]
) -> Generator[None, None, PagedAttention | None]:
    """Return the device's kernels, if it has any that are proved for such layers. Yields as `prove` does.

    `proved` says which kernels were proved for which geometry in this process, and is added to.
    """
    if query_head_count % shape.kv_head_count:
        query_head_count = shape.kv_head_count  # config.json does not say
    geometry = Geometry(shape, query_head_count, has_sinks)
    gather = GatherAttention()
    offered: Iterable[PagedAttention] = (
        [CpuAttention()] if find_backend() is Backend.CPU else gpu_attentions()
    )
    for number, kernels in enumerate(offered):
        if number != proved.get(geometry, number):
            continue
        if geometry in proved:
            return kernels
        why = yield from prove(
            shape, query_head_count, backend=kernels, reference=gather, has_sinks=has_sinks
        )
        if not why:
            proved[geometry] = number
            return kernels
        _log.warning("pages_unproved", extra={"detail": why})
    return None


@dataclasses.dataclass(slots=True)
class _TrialPool:
    shape: PoolShape
    array: mx.array
    order: mx.array
    view: mx.array | None = None


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
    """The pool's numbers before the passes."""
    passes: tuple[_Pass, ...]
    calls: tuple[AttentionCall, ...]
    """Every layer makes each of these calls."""


def prove(
    shape: PoolShape,
    query_head_count: int,
    *,
    backend: PagedAttention,
    reference: PagedAttention,
    has_sinks: bool = False,
) -> Generator[None, None, str]:
    """Return why the backend must not be used for such a model on this device, or "" if it is proved. Yields
    between parts of some 100 ms."""
    trial = yield from _prepare(
        dataclasses.replace(shape, layer_count=min(shape.layer_count, _MOST_LAYERS)),
        query_head_count,
        has_sinks=has_sinks,
    )
    yield
    wanted, wanted_pool = yield from _run(trial, reference, waits=True)
    yield
    try:
        outputs, pool = yield from _run(trial, backend, waits=False)
        mx.eval(outputs, pool)
    except (RuntimeError, ValueError) as error:
        return f"attention over pages failed: {error}"
    yield
    if not all(mx.array_equal(*each).item() for each in zip(pool, wanted_pool, strict=True)):
        return "the pages do not hold what was written"
    for index, (output, right) in enumerate(zip(outputs, wanted, strict=True)):
        highest, apart = _largest(right), _largest(output.astype(mx.float32) - right.astype(mx.float32))
        if not apart <= _TOLERANCE * highest:  # or where it is NaN
            call = trial.calls[index % len(trial.calls)]
            kind = f"window {call.window}, {'no ' if call.sinks is None else ''}sinks"
            return f"attention over pages ({kind}) is off by {apart:.3g} of {highest:.3g}"
    return ""


def _largest(numbers: mx.array) -> float:
    return float(mx.abs(numbers.astype(mx.float32)).max().item())  # type: ignore[arg-type]


def _run(
    trial: _Trial, backend: PagedAttention, *, waits: bool
) -> Generator[None, None, tuple[list[mx.array], list[mx.array]]]:
    """Return the outputs of all passes, and the pool's numbers after them: all pages, and the long row's.
    With `waits`, yields after each pass; otherwise nothing may come between the passes."""
    shape = trial.shape
    pool = _TrialPool(shape, mx.zeros(trial.content.shape, shape.dtype), mx.zeros((1,), mx.int32))
    mx.eval(pool.array, pool.order)
    everything = np.arange(trial.content.shape[0], dtype=np.int32)
    backend.fill_pages(pool, trial.content, everything)
    backend.copy_pages(pool, everything[:1], everything[-1:])
    outputs: list[mx.array] = []
    for is_one_launch, each in zip(itertools.cycle((True, False)), trial.passes, strict=False):
        own: list[mx.array] = []
        for layer in range(shape.layer_count):
            own.extend(_outputs(trial, backend, pool, each, layer, is_one_launch=is_one_launch))
        mx.async_eval(own, pool.order)  # type: ignore[no-untyped-call]
        if waits:
            mx.eval(own, pool.order)
            yield
        outputs.extend(own)
    whole = backend.read_pages(pool, everything)
    size, last = shape.page_token_count, shape.layer_count - 1
    # Without the row's first page, and with some tokens more than it has.
    row = backend.gather_row(
        pool, trial.passes[-1].places, row=_LONG_ROW, layer=last, first_token=size, key_count=_LONGEST + size
    )
    return outputs, [whole, *row]


def _outputs(
    trial: _Trial, backend: PagedAttention, pool: Pool, one: _Pass, layer: int, *, is_one_launch: bool
) -> Iterator[mx.array]:
    """Write, then make each call; with `is_one_launch` the first call writes as well."""
    if not is_one_launch:
        backend.write(pool, one.keys, one.values, one.places, layer=layer)
    for call in trial.calls:
        new = (one.keys, one.values) if is_one_launch and call is trial.calls[0] else None
        yield backend.attend(pool, one.queries, one.places, dataclasses.replace(call, layer=layer), new)


def _prepare(shape: PoolShape, query_head_count: int, *, has_sinks: bool) -> Generator[None, None, _Trial]:
    random = np.random.default_rng(_SEED)

    def normal(*sizes: int) -> mx.array:
        return mx.array(random.standard_normal(sizes, np.float32)).astype(shape.dtype)

    rows, begins, counts = _rows(shape.page_token_count)
    kv_heads, size = shape.kv_head_count, shape.head_size
    passes = []
    for step in range(_PASS_COUNT):
        places = TokenPlaces.of(rows, [b + step * n for b, n in zip(begins, counts, strict=True)], counts)
        token_count = places.token_count
        keys, values = (normal(token_count, kv_heads, 1, size) for _ in range(2))
        passes.append(_Pass(places, keys, values, normal(token_count, query_head_count, 1, size)))
    yield
    page_count = 1 + max(max(pages) for pages in rows)
    content = normal(page_count, shape.layer_count, 2, kv_heads, shape.page_token_count, size)
    window = shape.page_token_count + shape.page_token_count // 2
    sinks = [None, normal(query_head_count)] if has_sinks else [None]
    calls = (AttentionCall(0, size**-0.5, each, sink) for each in (None, window) for sink in sinks)
    return _Trial(shape, content, tuple(passes), tuple(calls))


def _rows(page: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Return each row's pages, the position at which it continues, and how many tokens it adds in each pass.

    The rows: one at its first token; one that reaches a page's end; one that shares the first page of
    another; a chunk across a page border; and a long one, which ends in the page that is a copy.
    """
    counts = [1, 1, 1, _CHUNK, 1]
    begins = [0, page - 1, page, max(page, 2 * page - 2), -(-_LONGEST // page) * page]
    shared, unused = 0, itertools.count(1)
    rows = []
    for begin, count, first in zip(begins, counts, ([], [], [shared], [shared], []), strict=True):
        page_count = -(-(begin + _PASS_COUNT * count) // page)
        rows.append([*first, *itertools.islice(unused, page_count - len(first))])
    return rows, begins, counts
