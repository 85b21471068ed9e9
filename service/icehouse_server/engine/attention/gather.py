"""Attention over pages in plain MLX: the reference for the other backends.

Each row's keys and values are copied from its pages and given to MLX's own attention. Long chunks of prompts
take this way on every device, since the copy is small beside such a chunk's computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.engine.attention.padding import Padding, padding_of
from icehouse_server.engine.attention.port import AttentionCall, Ints, PagedAttention, Pool, TokenPlaces


class GatherAttention:
    """Implements PagedAttention with one call of MLX's attention per row."""

    attends_to_chunks = False

    def write(self, pool: Pool, keys: mx.array, values: mx.array, places: TokenPlaces, *, layer: int) -> None:
        size = pool.shape.page_token_count
        pages = mx.array(places.pages[places.page_starts[places.rows] + places.positions // size])
        at = mx.array(places.positions % size)
        pool.array[pages, layer, 0, :, at] = keys[:, :, 0].astype(pool.shape.dtype)
        pool.array[pages, layer, 1, :, at] = values[:, :, 0].astype(pool.shape.dtype)
        pool.order = _order_behind(pool.array)

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
        outputs = [
            attend_row(self, pool, queries[start:stop], places, call, first=start)
            for start, stop in runs_of_rows(places.rows[: queries.shape[0]])
        ]
        return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]

    def gather_row(
        self, pool: Pool, places: TokenPlaces, *, row: int, layer: int, first_token: int, key_count: int
    ) -> tuple[mx.array, mx.array]:
        size = pool.shape.page_token_count
        skipped = first_token // size * size
        end = min(first_token + key_count, int(places.positions[places.rows == row].max()) + 1)
        pages = row_pages(places, row)[skipped // size : -(-end // size)]
        lacking = first_token + key_count - end
        shape = pool.shape
        heads = shape.kv_head_count
        flat = pool.array.reshape(-1, size, shape.head_size)
        first = (pages.astype(np.int32) * shape.layer_count + layer) * 2
        arrays = []
        for kind in (0, 1):
            runs = (first + kind) * heads + np.arange(heads, dtype=np.int32)[:, None]
            whole = mx.take(flat, mx.array(runs) + pool.order, axis=0).reshape(1, heads, -1, shape.head_size)
            arrays.append(whole[:, :, first_token - skipped : end - skipped])
        keys, values = arrays
        if lacking:
            keys, values = (
                mx.concatenate([array, mx.repeat(array[:, :, -1:], lacking, axis=2)], axis=2)
                for array in arrays
            )
        return keys, values

    def settle(self, pool: Pool) -> bool:
        return False

    def copy_pages(self, pool: Pool, sources: Ints, targets: Ints) -> None:
        self.fill_pages(pool, self.read_pages(pool, sources), targets)

    def fill_pages(self, pool: Pool, content: mx.array, pages: Ints) -> None:
        pool.array[mx.array(pages)] = content
        pool.order = _order_behind(pool.array)

    def read_pages(self, pool: Pool, pages: Ints) -> mx.array:
        return pool.array[mx.array(pages) + pool.order]


def attend_row(
    attention: PagedAttention,
    pool: Pool,
    queries: mx.array,
    places: TokenPlaces,
    call: AttentionCall,
    *,
    first: int,
    mask: Any = None,
    is_padded: bool = False,
) -> mx.array:
    """Return [tokens, heads, 1, head size] for consecutive tokens of one row, the first of them at `first`.

    `mask`: an array that broadcasts to [tokens, keys], instead of the causal rule. `is_padded`: pad to one of
    a few shapes, if the rule is causal.
    """
    count, begin, row = queries.shape[0], int(places.positions[first]), int(places.rows[first])
    # Read nothing before the window: in a restored row, that was never written.
    window = call.window
    low = 0 if window is None else max(0, begin + 1 - window)
    is_causal = mask is None and window is None
    padded = Padding(0, count, begin - low + count)
    if is_padded and is_causal:
        padded = padding_of(begin - low, count)
    keys, values = attention.gather_row(
        pool, places, row=row, layer=call.layer, first_token=low, key_count=padded.key_count
    )
    asking = queries.swapaxes(0, 2)
    if padded.query_count > count:
        behind = padded.query_count - padded.front_count - count
        asking = mx.pad(asking, [(0, 0), (0, 0), (padded.front_count, behind), (0, 0)])
    if mask is None:
        mask = causal_rule(begin - low, padded.query_count, window)
    elif mask.shape[-1] > 1:
        mask = mask[..., low:]
    output = mx.fast.scaled_dot_product_attention(
        asking, keys, values, scale=call.scale, mask=mask, sinks=call.sinks
    )
    if padded.query_count > count:
        output = output[:, :, padded.front_count : padded.front_count + count]
    return output.swapaxes(0, 2)


def row_pages(places: TokenPlaces, row: int) -> Ints:
    """Return the pages of one row."""
    starts = places.page_starts
    stop = starts[row + 1] if row + 1 < len(starts) else len(places.pages)
    return places.pages[starts[row] : stop]


def runs_of_rows(rows: Ints) -> Iterator[tuple[int, int]]:
    """Yield the first and last (exclusive) token of each row."""
    first = 0
    for _, same in itertools.groupby(rows.tolist()):
        last = first + sum(1 for _ in same)
        yield first, last
        first = last


def causal_rule(begin: int, count: int, window: int | None) -> Any:
    """Return the mask of `count` tokens after `begin` others."""
    if window is None:
        return "causal" if count > 1 else None
    asking = mx.arange(begin, begin + count)[:, None]
    seen = mx.arange(begin + count)
    return (seen <= asking) & (seen > asking - window)


def _order_behind(array: mx.array) -> mx.array:
    """Return a zero that is computed after this array."""
    order: mx.array = mx.depends(mx.zeros((1,), mx.int32), array)
    return order
