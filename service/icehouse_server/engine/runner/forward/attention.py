"""Attention of a pass: over the page pool, all rows of few tokens in one launch and each longer chunk by
itself; elsewhere row by row, each of which updates its own cache and attends to what that holds.

Every token is a batch row of length one, so queries, keys and values are [tokens, heads, 1, size].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention as upstream_attention

from icehouse_server.engine.attention.cpu.quantized import attend_in_floats, reads_floats
from icehouse_server.engine.attention.early_start import EARLY_START
from icehouse_server.engine.attention.gather import attend_row
from icehouse_server.engine.runner.forward.layer_view import FlatLayer, PagedLayer
from icehouse_server.engine.runner.forward.masks import Mask
from icehouse_server.engine.runner.forward.spans import SHORT_TOKEN_COUNT, SinglePlace, Spans
from icehouse_server.engine.runner.forward.ways import NotSplittable


def attend(
    layer: FlatLayer, queries: Any, keys: Any, values: Any, *, scale: float, mask: Any, sinks: Any
) -> mx.array:
    """Return [tokens, heads, 1, size]. A pass's first call updates the caches, later ones share its KV."""
    if layer.handed is None or values is not layer.handed[1]:
        raise NotSplittable("attention got other values than those that went into the cache")
    masks = layer.masks_for(mask)
    if layer.paged is not None:
        found = attend_pages(layer, layer.paged, queries, keys, values, scale=scale, masks=masks, sinks=sinks)
        EARLY_START.note_layer(found)
        return found
    if layer.fetched is None:
        layer.fetched = _updated(layer, keys, values)
    outputs = _by_row(layer, queries, masks, scale=scale, sinks=sinks)
    return mx.concatenate(outputs, axis=0) if len(outputs) > 1 else outputs[0]


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
    attention, pool, places = paged.group.attention, paged.group.pool, paged.places
    asked: dict[str, Any] = {
        "layer": paged.number,
        "scale": scale,
        "window": paged.group.window,
        "sinks": sinks,
    }
    is_first, layer.fetched = layer.fetched is None, []
    spans = layer.spans
    row_count, token_count = _together(spans, masks, takes_chunks=attention.attends_to_chunks)
    if is_first and token_count == spans.token_count:
        return attention.write_and_attend(pool, queries, keys, values, places, **asked)
    if is_first:
        attention.write(pool, keys, values, places, layer=paged.number)
    outputs = [attention.attend(pool, queries[:token_count], places, **asked)] if token_count else []
    for number in range(row_count, len(spans.rows)):
        start = spans.starts[number]
        asking = queries[start : start + spans.counts[number]]
        mask: Any = masks[number] if masks is not None else None
        outputs.append(
            attend_row(
                attention,
                pool,
                asking,
                places,
                first=start,
                mask=mask if isinstance(mask, mx.array) else None,
                is_padded=paged.group.has_costly_shapes,
                **asked,
            )
        )
    return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]


def _together(spans: Spans, masks: Sequence[Mask] | None, *, takes_chunks: bool) -> tuple[int, int]:
    """Return how many rows, the first ones, have no mask of their own and bring few tokens, unless attention
    takes chunks as well; and how many tokens these are."""
    if masks is not None and any(isinstance(mask, mx.array) for mask in masks):
        return 0, 0
    count = len(spans.counts)
    while count and not takes_chunks and spans.counts[count - 1] > SHORT_TOKEN_COUNT:
        count -= 1
    return count, spans.starts[count] if count < len(spans.starts) else spans.token_count


def _updated(layer: FlatLayer, keys: mx.array, values: mx.array) -> list[tuple[Any, Any]]:
    """Put the rows' keys and values into their caches; return what each row then attends to."""
    spans, is_plain = layer.spans, layer.cache_class.is_plain
    found: list[tuple[Any, Any]] = []
    for number, (k, v) in enumerate(zip(_cut(keys, spans.cuts), _cut(values, spans.cuts), strict=True)):
        cache = layer.caches[number]
        if is_plain and number < spans.single_count:
            found.append(append_one(cache, k, v, spans.single_places[number]))
            continue
        if spans.counts[number] > 1:
            k, v = k.swapaxes(0, 2), v.swapaxes(0, 2)
        found.append(cache.update_and_fetch(k, v))
    return found


def append_one(cache: Any, key: mx.array, value: mx.array, place: SinglePlace) -> tuple[Any, Any]:
    """Do what `update_and_fetch` of a plain cache does for one token where there is room, in less time.

    A third of its 5.5 us are for slices and shapes that are the same in every layer (x86, mlx 0.32.4).
    """
    keys, values = cache.keys, cache.values
    end, write, read = place
    if cache.offset != end - 1 or end > keys.shape[2]:
        fetched: tuple[Any, Any] = cache.update_and_fetch(key, value)
        return fetched
    keys[write] = key
    values[write] = value
    cache.offset = end
    return (keys, values) if end == keys.shape[2] else (keys[read], values[read])


def _by_row(
    layer: FlatLayer,
    queries: mx.array,
    masks: Sequence[Mask] | None,
    *,
    scale: float,
    sinks: mx.array | None,
) -> list[mx.array]:
    """Return what each row's tokens give, [tokens, heads, 1, size]."""
    assert layer.fetched is not None
    asked: dict[str, Any] = {"cache": layer.caches[0], "scale": scale, "sinks": sinks}
    found = []
    for i, (q, (k, v)) in enumerate(zip(_cut(queries, layer.spans.cuts), layer.fetched, strict=True)):
        mask = masks[i] if masks is not None else None
        if layer.spans.counts[i] == 1:
            found.append(_attended(q, k, v, mask=mask, **asked))
        else:
            found.append(_attended(q.swapaxes(0, 2), k, v, mask=mask, **asked).swapaxes(0, 2))
    return found


def _attended(
    queries: mx.array, keys: Any, values: Any, *, cache: Any, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Return [rows, heads, tokens, size], as queries are. ValueError where quantized KV meets sinks."""
    if sinks is None and reads_floats(queries, keys):
        how = {"group_size": cache.group_size, "bits": cache.bits}
        return attend_in_floats(queries, keys, values, **how, scale=scale, mask=mask)
    found: mx.array = upstream_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return found


def _cut(array: mx.array, cuts: list[int]) -> list[mx.array]:
    """Cut an array over tokens, [tokens, ...], at these places."""
    if not cuts:
        return [array]
    found: Any = mx.split(array, cuts, axis=0)
    return list(found)
