"""Views of one layer's caches of all rows, which a model is given in the place of one cache.

`FlatLayer` is served by attention: its `offset` is the array of positions, which RoPE takes, and its
`update_and_fetch` hands keys and values through to attention, where the queries are known too.
`SplitLayer` is served by the module that takes it; `ListLayer` stands for a CacheList served part by part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from icehouse_server.engine.attention.port import TokenPlaces
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv_cache.cache_classes import class_of, is_list
from icehouse_server.engine.runner.forward.masks import (
    Mask,
    RowMasks,
    asked_masks,
    chunked_masks,
    default_masks,
)
from icehouse_server.engine.runner.forward.spans import Spans
from icehouse_server.engine.runner.forward.ways import CacheWay, NotSplittable, Way

_CONSTANTS = frozenset({"max_size", "keep", "chunk_size", "group_size"})
"""Attributes that are equal in all rows' caches of a layer."""

HANDED: Final[dict[int, FlatLayer]] = {}
"""The layers of the pass being built, by the identity of the keys they handed through: some models' later
layers attend to an earlier one's keys without its cache. Empty between passes, which one thread builds."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer of a pass whose KV is in pages."""

    group: PageGroup
    places: TokenPlaces
    """The same for all layers of the pass."""
    number: int
    """Of the layer, in the pool."""


class FlatLayer:
    """One layer's caches, split by attention."""

    __slots__ = (
        "cache_class",
        "caches",
        "fetched",
        "handed",
        "offset",
        "paged",
        "spans",
    )

    def __init__(self, caches: Sequence[Any], spans: Spans) -> None:
        self.caches = caches
        self.paged: PagedLayer | None = None
        """Where keys and values lie, if that is in pages."""
        self.cache_class = class_of(caches[0])
        """Of all rows' caches."""
        self.spans = spans
        self.offset = spans.positions
        self.handed: tuple[Any, Any] | None = None
        """What the model was told to be the fetched keys and values."""
        self.fetched: list[Any] | None = None
        """Each row's keys and values, once attention has updated the caches; nothing of those in pages."""

    def __getattr__(self, name: str) -> Any:
        if name in _CONSTANTS:
            return getattr(self.caches[0], name)
        raise AttributeError(name)

    def make_mask(self, N: int, **asked: Any) -> RowMasks | None:
        return asked_masks(self.caches, self.spans.counts, wholes=self.spans.wholes, **asked)

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
        """[3, tokens], for models that tell an image's rows and columns; of text all three are alike."""
        laid = self.spans.rope_positions
        return mx.broadcast_to(self.offset, (3, *self.offset.shape)) if laid is None else laid

    def masks_for(self, mask: Any) -> Sequence[Mask] | None:
        """Return the rows' masks for what the model passed to attention; None when no row needs one."""
        if isinstance(mask, RowMasks):
            return mask.masks
        if self.cache_class.masks_chunks:
            key = ("chunked", self.caches[0].chunk_size)
            if key not in self.spans.shared:
                self.spans.shared[key] = chunked_masks(self.caches, self.spans.counts)
            found: Sequence[Mask] = self.spans.shared[key]
            return found
        if mask is not None:
            raise NotSplittable(f"a mask was made that is not the rows' own: {type(mask).__name__}")
        if self.spans.token_count == len(self.caches):
            return None
        return default_masks(self.caches, self.spans.counts, as_array=False)


class SplitLayer:
    """One layer's caches, split by the module that takes this."""

    __slots__ = ("caches", "flat", "is_used", "offset", "owner", "spans", "stacked", "start_position")
    lengths = None

    def __init__(self, caches: Sequence[Any], spans: Spans, *, way: CacheWay) -> None:
        self.caches = caches
        self.spans = spans
        self.flat = FlatLayer(caches, spans) if way.is_entered else None
        self.is_used = False
        """Whether a module was called with it, or with a part of it."""
        self.owner: SplitLayer | None = None
        """Whose part it is."""
        self.stacked: Any = None
        """One cache with the states of the first `spans.single_count` rows, if they are stacked."""
        # Some bodies compute with a chunked cache's numbers, to make a mask that is not used.
        self.offset: mx.array | int = 0 if way.is_entered else spans.positions
        self.start_position = 0

    def __getattr__(self, name: str) -> Any:
        if name in _CONSTANTS:
            return getattr(self.caches[0], name)
        raise AttributeError(name)

    def __getitem__(self, index: int) -> SplitLayer:
        """Return the view of one part, where this stands for a CacheList as a whole."""
        if not is_list(self.caches[0]):
            raise NotSplittable("a state is read outside of the module that takes it")
        part = SplitLayer([cache[index] for cache in self.caches], self.spans, way=CacheWay(Way.MODULE))
        part.owner = self
        return part

    def note_used(self) -> None:
        """Note that a module is called with it."""
        self.is_used = True
        if self.owner is not None:
            self.owner.note_used()

    def make_mask(self, N: int, **asked: Any) -> RowMasks | None:
        return asked_masks(self.caches, self.spans.counts, **asked)

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


def view_of(caches: Sequence[Any], spans: Spans, way: CacheWay) -> View:
    """Return the view of one layer: `caches` are the rows' in the order of the spans."""
    if way.parts:
        columns = zip(*(cache.caches for cache in caches), strict=True)
        return ListLayer([view_of(c, spans, w) for c, w in zip(columns, way.parts, strict=True)])
    if way.way is Way.ATTENTION and not way.is_entered:
        return FlatLayer(caches, spans)
    return SplitLayer(caches, spans, way=way)


def leaf_views(views: Sequence[View]) -> list[FlatLayer | SplitLayer]:
    """Return the views that are no lists, in the order of the caches' leaves."""
    found: list[FlatLayer | SplitLayer] = []
    for view in views:
        found += leaf_views(view.caches) if isinstance(view, ListLayer) else [view]
    return found


def was_used(view: View) -> bool:
    """Whether the pass reached the layer that a view is of."""
    if isinstance(view, ListLayer):
        return any(was_used(part) for part in view.caches)
    return view.handed is not None if isinstance(view, FlatLayer) else view.is_used


def check_used(views: Sequence[View]) -> None:
    """Raise NotSplittable when keys went into a layer and attention never asked for them."""
    for view in leaf_views(views):
        flat = view if isinstance(view, FlatLayer) else view.flat
        if flat is not None and flat.handed is not None and flat.fetched is None:
            raise NotSplittable("a layer's keys do not reach attention")
