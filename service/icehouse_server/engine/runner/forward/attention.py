"""Attention of a pass: over the page pool, all rows of few tokens in one launch and each longer chunk by
itself; elsewhere row by row, each of which updates its own cache and attends to what that holds.

Every token is a batch row of length one, so queries, keys and values are [tokens, heads, 1, size].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from icehouse_server.engine.attention.gather import attend_row
from icehouse_server.engine.runner.forward.cpu.attention import Call, fused_attention
from icehouse_server.engine.runner.forward.cpu.quantized import quantized_attention
from icehouse_server.engine.runner.forward.layer_view import FlatLayer, PagedLayer, Piece
from icehouse_server.engine.runner.forward.masks import Mask
from icehouse_server.engine.runner.forward.slab import Seat
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
        return attend_pages(layer, layer.paged, queries, keys, values, scale=scale, masks=masks, sinks=sinks)
    if layer.fetched is None:
        layer.pieces = _pieces(layer, masks)
        cuts = [layer.spans.starts[piece.first] for piece in layer.pieces[1:]]
        parts = zip(layer.pieces, _cut(keys, cuts), _cut(values, cuts), strict=True)
        written = [_write(layer, piece, k, v) for piece, k, v in parts]
        layer.fetched = [
            _read(layer, piece, found) for piece, found in zip(layer.pieces, written, strict=True)
        ]
    cuts = [layer.spans.starts[piece.first] for piece in layer.pieces[1:]]
    calls: list[Call] = []
    for piece, q, fetched in zip(layer.pieces, _cut(queries, cuts), layer.fetched, strict=True):
        if piece.run is None:
            calls += _calls(layer, piece, q, fetched, masks)
        elif masks is None or all(each is None for each in masks[piece.first : piece.last]):
            calls.append(piece.run.call(q, fetched))
        else:
            raise NotSplittable("a mask came for keys that were written for rows without one")
    if layer.cache_class.takes_fused_attention:
        outputs = fused_attention(calls, scale=scale, sinks=sinks)
    else:
        outputs = quantized_attention(calls, cache=layer.kept_as, scale=scale, sinks=sinks)
    outputs = [out if out.shape[2] == 1 else out.swapaxes(0, 2) for out in outputs]
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


def _pieces(layer: FlatLayer, masks: Sequence[Mask] | None) -> list[Piece]:
    """Return the rows in pieces: those side by side in a slab together, all others each by itself."""
    pieces, first = [], 0
    for begin, end, run in layer.runs:
        if masks is not None and any(mask is not None for mask in masks[begin:end]):
            continue
        if begin > first:
            pieces.append(Piece(first, begin, None))
        pieces.append(Piece(begin, end, run))
        first = end
    if first < len(layer.caches):
        pieces.append(Piece(first, len(layer.caches), None))
    return pieces


def _write(layer: FlatLayer, piece: Piece, keys: mx.array, values: mx.array) -> list[tuple[Any, Any] | Seat]:
    """Put the rows' keys and values into their caches; return what each row then attends to.

    What lies in buffers for several is read once all of them have written: it stands as the row's seat, or
    not at all for a run.
    """
    if piece.run is not None:
        piece.run.write(layer.place, keys, values)
        return []
    spans, is_plain = layer.spans, layer.cache_class.is_plain
    found: list[tuple[Any, Any] | Seat] = []
    cuts = _row_cuts(layer, piece)
    for number, (k, v) in enumerate(zip(_cut(keys, cuts), _cut(values, cuts), strict=True), piece.first):
        cache = layer.caches[number]
        if is_plain and number < spans.single_count and not isinstance(cache, Seat):
            found.append(append_one(cache, k, v, spans.single_places[number]))
            continue
        if spans.counts[number] > 1:
            k, v = k.swapaxes(0, 2), v.swapaxes(0, 2)
        if isinstance(cache, Seat):
            cache.write(k, v)
            found.append(cache)
        else:
            found.append(cache.update_and_fetch(k, v))
    return found


def _read(layer: FlatLayer, piece: Piece, written: Sequence[tuple[Any, Any] | Seat]) -> Any:
    """Return what each row of a piece attends to, or all of a run."""
    if piece.run is not None:
        return piece.run.fetch(layer.place)
    counts = layer.spans.counts
    return [
        found.fetch(counts[number]) if isinstance(found, Seat) else found
        for number, found in enumerate(written, piece.first)
    ]


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


def _calls(
    layer: FlatLayer,
    piece: Piece,
    queries: mx.array,
    fetched: Sequence[tuple[Any, Any]],
    masks: Sequence[Mask] | None,
) -> list[Call]:
    """Return each row's attention, [1, heads, tokens, size]."""
    by_row = _cut(queries, _row_cuts(layer, piece))
    if masks is None and layer.is_plain:  # the many short rows of decoding
        return [Call(q, k, v) for q, (k, v) in zip(by_row, fetched, strict=True)]
    found = []
    for i, (q, (k, v)) in enumerate(zip(by_row, fetched, strict=True), piece.first):
        mask = masks[i] if masks is not None else None
        found.append(Call(q.swapaxes(0, 2) if layer.spans.counts[i] > 1 else q, k, v, mask))
    return found


def _row_cuts(layer: FlatLayer, piece: Piece) -> list[int]:
    starts = layer.spans.starts
    if piece.first == 0:
        return list(starts[1 : piece.last])
    return [start - starts[piece.first] for start in starts[piece.first + 1 : piece.last]]


def _cut(array: mx.array, cuts: list[int]) -> list[mx.array]:
    """Cut an array over tokens, [tokens, ...], at these places."""
    if not cuts:
        return [array]
    found: Any = mx.split(array, cuts, axis=0)
    return list(found)
