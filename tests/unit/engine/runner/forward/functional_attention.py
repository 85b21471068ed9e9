"""Attention over pages in plain MLX whose passes can be replayed on any device.

The GPU's kernels write into the pool in place, in an order that `Pool.order` carries. Here `order` is the
pool's content itself, and places are an array of padded page numbers, so that a traced pass is as pure as
MLX's own functions are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import mlx.core as mx
import numpy as np
from icehouse_server.engine.attention.gather import GatherAttention, row_pages
from icehouse_server.engine.attention.port import AttentionCall, Ints, Pool, PoolShape, TokenPlaces

_STEP = 8
"""Pages that a row is padded to a multiple of."""


@dataclasses.dataclass(slots=True)
class _Content:
    """A pool as `GatherAttention` reads it."""

    shape: PoolShape
    array: mx.array
    order: mx.array
    view: mx.array | None = None


class FunctionalAttention:
    """Implements ReplayedAttention."""

    attends_to_chunks = False

    def __init__(self) -> None:
        self._gather = GatherAttention()

    def write(self, pool: Pool, keys: mx.array, values: mx.array, places: TokenPlaces, *, layer: int) -> None:
        shape, array, size = pool.shape, self.array_of(places), pool.shape.page_token_count
        rows, positions = mx.array(places.rows), array[:, 0]
        at = positions if len(positions) == len(rows) else mx.array(places.positions)
        pages = array[rows, 1 + at // size]
        content = _content(pool) + 0.0
        content[pages, layer, 0, :, at % size] = keys[:, :, 0].astype(shape.dtype)
        content[pages, layer, 1, :, at % size] = values[:, :, 0].astype(shape.dtype)
        pool.order = content

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
        if len(places.rows) > len(places.page_starts):
            return self._gather.attend(_as_pool(pool), queries, places, call)
        array, content = self.array_of(places)[: queries.shape[0]], _content(pool)
        own = content[mx.maximum(array[:, 1:], 0), call.layer]  # [rows, pages, 2, heads, tokens, size]
        keys, values = (
            own[:, :, kind].swapaxes(1, 2).reshape(own.shape[0], own.shape[3], -1, own.shape[-1])
            for kind in (0, 1)
        )
        seen, positions = mx.arange(keys.shape[2])[None], array[:, :1]
        mask = seen <= positions
        if call.window is not None:
            mask = mask & (seen > positions - call.window)
        mask = mask[:, None, None]
        keys, values = (mx.where(mask.swapaxes(2, 3), each, 0.0) for each in (keys, values))
        output: mx.array = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=call.scale, mask=mask, sinks=call.sinks
        )
        return output

    def gather_row(self, pool: Pool, places: TokenPlaces, **which: Any) -> tuple[mx.array, mx.array]:
        return self._gather.gather_row(_as_pool(pool), places, **which)

    def settle(self, pool: Pool) -> bool:
        return False

    def copy_pages(self, pool: Pool, sources: Ints, targets: Ints) -> None:
        self.fill_pages(pool, self.read_pages(pool, sources), targets)

    def fill_pages(self, pool: Pool, content: mx.array, pages: Ints) -> None:
        whole = _content(pool) + 0.0
        whole[mx.array(pages)] = content
        pool.order = whole

    def read_pages(self, pool: Pool, pages: Ints) -> mx.array:
        return _content(pool)[mx.array(pages)]

    def array_of(self, places: TokenPlaces) -> mx.array:
        """Return [rows, 1 + pages]: the position of the row's last token in this pass, and its pages."""
        known: mx.array | None = places.derived.get(FunctionalAttention)
        if known is None:
            tables = [row_pages(places, row) for row in range(len(places.page_starts))]
            width = -(-max(map(len, tables)) // _STEP) * _STEP
            array = np.full((len(tables), 1 + width), -1, np.int32)
            for row, table in enumerate(tables):
                array[row, 0] = places.positions[places.rows == row].max()
                array[row, 1 : 1 + len(table)] = table
            known = places.derived[FunctionalAttention] = mx.array(array)
        return known

    def launch_of(self, places: TokenPlaces, window: int | None) -> Hashable:
        return tuple(self.array_of(places).shape)

    def placed(self, places: TokenPlaces, array: mx.array) -> TokenPlaces:
        return dataclasses.replace(places, derived={FunctionalAttention: array})


def _content(pool: Pool) -> mx.array:
    """Return the pool's pages, as the latest write left them."""
    if pool.order.ndim == 1:
        return pool.array
    added = pool.array.shape[0] - pool.order.shape[0]
    return mx.concatenate([pool.order, pool.array[-added:]]) if added else pool.order


def _as_pool(pool: Pool) -> _Content:
    return _Content(pool.shape, _content(pool), mx.zeros((1,), mx.int32))
