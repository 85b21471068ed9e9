"""Views of one layer's caches of all rows, which a model gets instead of one cache, and attention over them.

Attention serves `FlatLayer`: its `offset` is the array of positions, which RoPE takes, and its
`update_and_fetch` passes keys and values through to attention, where the queries are known, too. The module
that takes a `SplitLayer` serves it; `ListLayer` stands for a CacheList served part by part.

Every token is a batch row of length one, so queries, keys and values are [tokens, heads, 1, size]. If KV is
in pages, rows of few tokens attend in one launch and each longer chunk separately; otherwise each row updates
its own cache and attends to what that holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention as upstream_attention

from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.attention.build_hooks import EARLY_START
from icehouse_server.engine.attention.cpu.quantized import attend_in_floats, reads_floats
from icehouse_server.engine.attention.gather import attend_row
from icehouse_server.engine.attention.port import AttentionCall, TokenPlaces
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv_cache.cache_classes import class_of, is_list
from icehouse_server.engine.runner.forward.masks import (
    Mask,
    RowMasks,
    chunked_masks,
    default_masks,
    made_masks,
)
from icehouse_server.engine.runner.forward.row_spans import SHORT_TOKEN_COUNT, RowSpans
from icehouse_server.engine.runner.forward.splits import CacheSplit, NotSplittable

_CONSTANTS = frozenset({"max_size", "keep", "chunk_size", "group_size"})
"""Attributes that are equal in all rows' caches of a layer."""

HANDED: Final[dict[int, FlatLayer]] = {}
"""The layers of the pass being built, by the identity of the keys they passed through: later layers of some
models attend to an earlier one's keys without its cache. Empty between passes, which one thread builds."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer of a pass whose KV is in pages."""

    group: PageGroup
    places: TokenPlaces
    """The same for all layers of the pass."""
    number: int
    """The layer's number in the pool."""


class _RowCaches:
    """One layer's caches of all rows; attributes that are equal in all of them read like one cache's."""

    __slots__ = ("caches", "spans")

    def __init__(self, caches: Sequence[Any], spans: RowSpans) -> None:
        self.caches = caches
        self.spans = spans

    def __getattr__(self, name: str) -> Any:
        if name in _CONSTANTS:
            return getattr(self.caches[0], name)
        raise AttributeError(name)


class FlatLayer(_RowCaches):
    """One layer's caches, split by attention."""

    __slots__ = ("cache_class", "fetched", "handed", "offset", "paged")

    def __init__(self, caches: Sequence[Any], spans: RowSpans) -> None:
        super().__init__(caches, spans)
        self.paged: PagedLayer | None = None
        """Where keys and values are, if they are in pages."""
        self.cache_class = class_of(caches[0])
        """The entry for all rows' caches."""
        self.offset = spans.positions
        self.handed: tuple[Any, Any] | None = None
        """What the model got as the fetched keys and values."""
        self.fetched: list[Any] | None = None
        """Each row's keys and values, once attention has updated the caches; empty for those in pages."""

    def make_mask(self, N: int, **options: Any) -> RowMasks | None:
        return made_masks(self.caches, self.spans.counts, wholes=self.spans.wholes, **options)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.handed is not None:
            raise NotSplittable("a cache is updated twice in one pass")
        self.handed = (keys, values)
        HANDED[id(keys)] = self
        return keys, values

    def keys_and_values(self) -> tuple[Any, Any]:
        if self.handed is None:
            raise NotSplittable("a cache is read before it is updated")
        return self.handed

    @property
    def rope_positions(self) -> mx.array:
        """[3, tokens], for models that distinguish an image's rows and columns; for text all three are
        equal."""
        laid = self.spans.rope_positions
        return mx.broadcast_to(self.offset, (3, *self.offset.shape)) if laid is None else laid

    def masks_for(self, mask: Any) -> Sequence[Mask] | None:
        """Return the rows' masks for what the model passed to attention; None if no row needs one."""
        if isinstance(mask, RowMasks):
            return mask.masks
        if self.cache_class.masks_chunks:
            key = ("chunked", self.caches[0].chunk_size)
            if key not in self.spans.shared:
                self.spans.shared[key] = chunked_masks(self.caches, self.spans.counts)
            masks: Sequence[Mask] = self.spans.shared[key]
            return masks
        if mask is not None:
            raise NotSplittable(f"a mask was made that is not the rows' own: {type(mask).__name__}")
        if self.spans.token_count == len(self.caches):
            return None
        return default_masks(self.caches, self.spans.counts, as_array=False)


class SplitLayer(_RowCaches):
    """One layer's caches, split by the module that takes this view."""

    __slots__ = ("flat", "is_used", "offset", "owner", "stacked", "start_position")
    lengths = None

    def __init__(self, caches: Sequence[Any], spans: RowSpans, *, split: CacheSplit) -> None:
        super().__init__(caches, spans)
        self.flat = FlatLayer(caches, spans) if split.is_entered else None
        self.is_used = False
        """Whether a module was called with it, or with a part of it."""
        self.owner: SplitLayer | None = None
        """The view that this is a part of."""
        self.stacked: Any = None
        """One cache with the states of the first `spans.single_count` rows, if they are stacked."""
        # Some bodies compute with a chunked cache's numbers, to make a mask that is not used.
        self.offset: mx.array | int = 0 if split.is_entered else spans.positions
        self.start_position = 0

    def __getitem__(self, index: int) -> SplitLayer:
        """Return the view of one part, if this stands for a whole CacheList."""
        if not is_list(self.caches[0]):
            raise NotSplittable("a state is read outside of the module that takes it")
        part = SplitLayer(
            [cache[index] for cache in self.caches], self.spans, split=CacheSplit(PassSplit.MODULE)
        )
        part.owner = self
        return part

    def note_used(self) -> None:
        """Note that a module is called with it."""
        self.is_used = True
        if self.owner is not None:
            self.owner.note_used()

    def make_mask(self, N: int, **options: Any) -> RowMasks | None:
        return made_masks(self.caches, self.spans.counts, **options)

    def maybe_trim_front(self) -> None:
        for cache in self.caches:
            cache.maybe_trim_front()

    def masks_for(self, mask: Any) -> Sequence[Mask]:
        """Return the rows' masks for what the model passed to the module."""
        if isinstance(mask, RowMasks):
            return mask.masks
        if class_of(self.caches[0]).masks_chunks:
            return chunked_masks(self.caches, self.spans.counts)
        return default_masks(self.caches, self.spans.counts, as_array=True)


class ListLayer:
    """A CacheList served part by part."""

    __slots__ = ("caches",)

    def __init__(self, parts: Sequence[View]) -> None:
        self.caches = tuple(parts)

    def __getitem__(self, index: int) -> View:
        return self.caches[index]


View = FlatLayer | SplitLayer | ListLayer


def view_of(caches: Sequence[Any], spans: RowSpans, split: CacheSplit) -> View:
    """Return the view of one layer; `caches` are the rows' in the order of the spans."""
    if split.parts:
        columns = zip(*(cache.caches for cache in caches), strict=True)
        return ListLayer([view_of(c, spans, w) for c, w in zip(columns, split.parts, strict=True)])
    if split.mode is PassSplit.ATTENTION and not split.is_entered:
        return FlatLayer(caches, spans)
    return SplitLayer(caches, spans, split=split)


def leaf_views(views: Sequence[View]) -> list[FlatLayer | SplitLayer]:
    """Return the views that are not lists, in the order of the caches' leaves."""
    by_leaf: list[FlatLayer | SplitLayer] = []
    for view in views:
        by_leaf += leaf_views(view.caches) if isinstance(view, ListLayer) else [view]
    return by_leaf


def was_used(view: View) -> bool:
    """Whether the pass reached the view's layer."""
    if isinstance(view, ListLayer):
        return any(was_used(part) for part in view.caches)
    return view.handed is not None if isinstance(view, FlatLayer) else view.is_used


def check_used(views: Sequence[View]) -> None:
    """Raise NotSplittable if keys went into a layer and attention never asked for them."""
    for view in leaf_views(views):
        flat = view if isinstance(view, FlatLayer) else view.flat
        if flat is not None and flat.handed is not None and flat.fetched is None:
            raise NotSplittable("a layer's keys do not reach attention")


def attend(
    layer: FlatLayer, queries: Any, keys: Any, values: Any, *, scale: float, mask: Any, sinks: Any
) -> mx.array:
    """Return [tokens, heads, 1, size]. A pass's first call updates the caches; later ones share its KV."""
    if layer.handed is None or values is not layer.handed[1]:
        raise NotSplittable("attention got other values than those that went into the cache")
    masks = layer.masks_for(mask)
    if layer.paged is not None:
        call = AttentionCall(layer.paged.number, scale, layer.paged.group.window, sinks)
        output = _attend_pages(layer, layer.paged, queries, (keys, values), masks, call)
        EARLY_START.note_layer(output)
        return output
    if layer.fetched is None:
        layer.fetched = _updated(layer, keys, values)
    outputs = _by_row(layer, queries, masks, scale=scale, sinks=sinks)
    return mx.concatenate(outputs, axis=0) if len(outputs) > 1 else outputs[0]


def _attend_pages(
    layer: FlatLayer,
    paged: PagedLayer,
    queries: mx.array,
    new: tuple[mx.array, mx.array],
    masks: Sequence[Mask] | None,
    call: AttentionCall,
) -> mx.array:
    """Return [tokens, heads, 1, head size]. A pass's first call writes keys and values; later ones share
    them."""
    attention, pool, places = paged.group.attention, paged.group.pool, paged.places
    is_first, layer.fetched = layer.fetched is None, []
    spans = layer.spans
    row_count, token_count = _together(spans, masks, takes_chunks=attention.attends_to_chunks)
    if spans.is_traced and token_count < spans.token_count:
        raise NotSplittable("a row's mask is that of this pass")
    if is_first and token_count == spans.token_count:
        return attention.attend(pool, queries, places, call, new)
    if is_first:
        attention.write(pool, *new, places, layer=call.layer)
    outputs = [attention.attend(pool, queries[:token_count], places, call)] if token_count else []
    for number in range(row_count, len(spans.rows)):
        start = spans.starts[number]
        own = queries[start : start + spans.counts[number]]
        mask = masks[number] if masks is not None and isinstance(masks[number], mx.array) else None
        is_padded = paged.group.has_costly_shapes
        outputs.append(
            attend_row(attention, pool, own, places, call, first=start, mask=mask, is_padded=is_padded)
        )
    return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]


def _together(spans: RowSpans, masks: Sequence[Mask] | None, *, takes_chunks: bool) -> tuple[int, int]:
    """Return how many of the first rows attend in one launch, and their token count: rows without a mask of
    their own and with few tokens, or with any number if attention takes chunks."""
    if masks is not None and any(isinstance(mask, mx.array) for mask in masks):
        return 0, 0
    count = len(spans.counts)
    while count and not takes_chunks and spans.counts[count - 1] > SHORT_TOKEN_COUNT:
        count -= 1
    return count, spans.starts[count] if count < len(spans.starts) else spans.token_count


def _updated(layer: FlatLayer, keys: mx.array, values: mx.array) -> list[tuple[Any, Any]]:
    """Put the rows' keys and values into their caches; return what each row then attends to."""
    spans = layer.spans
    fetched: list[tuple[Any, Any]] = []
    for number, (k, v) in enumerate(zip(_cut(keys, spans.cuts), _cut(values, spans.cuts), strict=True)):
        if spans.counts[number] > 1:
            k, v = k.swapaxes(0, 2), v.swapaxes(0, 2)
        fetched.append(layer.caches[number].update_and_fetch(k, v))
    return fetched


def _by_row(
    layer: FlatLayer, queries: mx.array, masks: Sequence[Mask] | None, *, scale: float, sinks: mx.array | None
) -> list[mx.array]:
    """Return each row's output, [tokens, heads, 1, size].

    Raises ValueError if quantized KV meets sinks.
    """
    assert layer.fetched is not None
    cache, outputs = layer.caches[0], []
    for i, (q, (k, v)) in enumerate(zip(_cut(queries, layer.spans.cuts), layer.fetched, strict=True)):
        mask = masks[i] if masks is not None else None
        is_chunk = layer.spans.counts[i] > 1
        asking = q.swapaxes(0, 2) if is_chunk else q
        if sinks is None and reads_floats(asking, k):
            form = {"group_size": cache.group_size, "bits": cache.bits}
            output = attend_in_floats(asking, k, v, **form, scale=scale, mask=mask)
        else:
            output = upstream_attention(asking, k, v, cache=cache, scale=scale, mask=mask, sinks=sinks)
        outputs.append(output.swapaxes(0, 2) if is_chunk else output)
    return outputs


def _cut(array: mx.array, cuts: list[int]) -> list[mx.array]:
    """Cut an array over tokens, [tokens, ...], at these places."""
    if not cuts:
        return [array]
    parts: Any = mx.split(array, cuts, axis=0)
    return list(parts)
