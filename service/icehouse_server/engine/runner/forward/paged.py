"""Attention of a pass over pages: all rows write at once, rows of few tokens attend together, each long chunk
by itself. Every token is a batch row of length one: arrays are [tokens, heads, 1, size]."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from icehouse_server.engine.attention.gather import attend_row
from icehouse_server.engine.attention.port import TokenPlaces
from icehouse_server.engine.kv.table import PageGroup
from icehouse_server.engine.runner.forward.masks import Mask
from icehouse_server.engine.runner.forward.spans import SHORT_TOKEN_COUNT, Spans

if TYPE_CHECKING:
    from icehouse_server.engine.runner.forward.layer_view import FlatLayer


@dataclasses.dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer of a pass whose KV is in pages."""

    group: PageGroup
    places: TokenPlaces
    """The same for all layers of the pass."""
    number: int
    """Of the layer, in the pool."""


def attend_pages(
    layer: FlatLayer,
    paged: PagedLayer,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    masks: Sequence[Mask] | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return [tokens, heads, 1, size]. A pass's first call writes keys and values, later ones share them."""
    pool, attention, places = paged.group.pool, paged.group.attention, paged.places
    window = paged.group.window
    is_first = layer.fetched is None
    spans = layer.spans
    has_arrays = masks is not None and any(isinstance(mask, mx.array) for mask in masks)
    row_count = 0 if has_arrays else _short_count(spans)
    token_count = spans.starts[row_count] if row_count < len(spans.starts) else spans.token_count
    if is_first:
        layer.fetched = []
        if token_count == spans.token_count:
            return attention.write_and_attend(
                pool,
                queries,
                keys,
                values,
                places,
                layer=paged.number,
                scale=scale,
                window=window,
                sinks=sinks,
            )
        attention.write(pool, keys, values, places, layer=paged.number)
    outputs: list[mx.array] = []
    if token_count:
        outputs.append(
            attention.attend(
                pool,
                queries[:token_count],
                places,
                layer=paged.number,
                scale=scale,
                window=window,
                sinks=sinks,
            )
        )
    for number in range(row_count, len(spans.rows)):
        start = spans.starts[number]
        mask: Any = masks[number] if masks is not None else None
        outputs.append(
            attend_row(
                attention,
                pool,
                queries[start : start + spans.counts[number]],
                places,
                first=start,
                layer=paged.number,
                scale=scale,
                window=window,
                sinks=sinks,
                mask=mask if isinstance(mask, mx.array) else None,
                is_padded=paged.group.has_costly_shapes,
            )
        )
    return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]


def _short_count(spans: Spans) -> int:
    """Return how many rows, the first ones, bring few tokens."""
    count = len(spans.counts)
    while count and spans.counts[count - 1] > SHORT_TOKEN_COUNT:
        count -= 1
    return count
