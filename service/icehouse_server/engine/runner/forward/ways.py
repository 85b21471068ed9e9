"""Ways in which the layers of a model keep the rows of a pass apart, found out by `trial`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from icehouse_server.engine.kv_cache.cache_classes import class_of, is_list
from icehouse_server.engine.kv_cache.sharing import can_share


class NotSplittable(Exception):
    """A model does with its caches what cannot be done for several rows in this way."""


class Way(enum.Enum):
    """How rows are kept apart where a cache is used."""

    ATTENTION = "attention"
    """In `scaled_dot_product_attention`: everything around it is computed for all tokens at once."""
    MODULE = "module"
    """In the module that takes the cache: each row calls it, or decoding rows together on stacked states."""
    ALONE = "alone"
    """Not within the model: each row is a call of its own."""


class Attention(enum.Enum):
    """How decoding rows attend."""

    ROWS = "rows"
    """Each to caches of its own."""
    SLAB = "slab"
    """Those of like length together, to buffers that they share."""
    PAGES = "pages"
    """All together, to pages of one pool."""
    AUTO = "auto"
    """By pages where the device runs ahead and its kernels are proved; else whichever of the other two the
    passes that ran say is cheaper (`slab_choice`)."""


class Door(enum.Enum):
    """Where a module that takes a cache is looked for."""

    INNER = "inner"
    """Inside the layers: attention, mixer, convolution."""
    LAYER = "layer"
    """The layers themselves."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheWay:
    """How one cache of a model is served."""

    way: Way
    is_stacked: bool = False
    """Decoding rows share a call of the module, over stacked states."""
    is_entered: bool = False
    """The model's body reads this cache's offset as a number: it is shown 0, its attention the positions."""
    parts: tuple[CacheWay, ...] = ()
    """Of a CacheList whose parts are served one by one; empty for everything else."""

    @property
    def needs_door(self) -> bool:
        """Whether a module that takes this cache splits the rows, or is told their positions."""
        if self.parts:
            return any(part.needs_door for part in self.parts)
        return self.is_entered or self.way is Way.MODULE

    def leaf_ways(self) -> tuple[Way, ...]:
        """Return the ways of all parts."""
        return tuple(way for part in self.parts for way in part.leaf_ways()) if self.parts else (self.way,)


@dataclasses.dataclass(frozen=True, slots=True)
class PassFacts:
    """What was found out about one model when its ForwardPass was made."""

    caches: tuple[CacheWay, ...]
    """One for each cache of `make_prompt_cache`; empty where rows run alone."""
    door: Door = Door.INNER
    gathers_hidden: bool = False
    """The head reads only the wanted positions; else it reads all, and logits are picked from them."""
    gives_hidden: bool = False
    """Hidden states can be had."""
    can_take_back: bool = False
    """Speculation is possible: every cache class can give tokens back."""
    takes_slab: bool = False
    """Some layer is attention of unlimited context, so decoding rows may keep its KV in a slab."""
    layer_count: int = 0
    """Layers that a chunk may go through a few in each pass; 0 where it goes through all in one."""
    reason: str = ""
    """Why it is not a better way: the first error of each way that was tried before."""

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in use, sorted: ("attention",), ("attention", "module"), ("alone",)."""
        found = {way.value for cache in self.caches for way in cache.leaf_ways()}
        return tuple(sorted(found)) or (Way.ALONE.value,)


def candidates(caches: Sequence[Any]) -> list[tuple[tuple[CacheWay, ...], Door]]:
    """Return what may be tried for a model with such caches, best first.

    Each kind of cache (its class and its place in a list) is served alike in all layers, by attention if
    possible; what needs modules tries the inner ones before the layers.
    """
    kinds = sorted({kind for cache in caches for kind in _kinds_of(cache, ())}, key=str)
    plans: list[tuple[tuple[CacheWay, ...], Door]] = []
    for door in Door:
        for split in _subsets(kinds):
            plan = tuple(_way_of(cache, (), split) for cache in caches)
            needs_door = any(way is Way.MODULE for entry in plan for way in entry.leaf_ways())
            if (plan, door) not in plans and (door is Door.INNER or needs_door):
                plans.append((plan, door))
    return plans


def attending_places(ways: Sequence[CacheWay]) -> list[int]:
    """Return which of a row's caches are served by attention alone."""
    return [
        place
        for place, way in enumerate(ways)
        if way.way is Way.ATTENTION and not way.parts and not way.is_entered
    ]


def slab_places(ways: Sequence[CacheWay], caches: Sequence[Any]) -> list[int]:
    """Return which of a row's caches a slab can keep."""
    return [
        place
        for place, (way, cache) in enumerate(zip(ways, caches, strict=True))
        if way.way is Way.ATTENTION and not way.parts and can_share(cache)
    ]


_Kind = tuple[object, ...]


def _kinds_of(cache: Any, place: _Kind) -> list[_Kind]:
    kind = (*place, type(cache).__name__)
    if is_list(cache):
        inner = [found for i, part in enumerate(cache.caches) for found in _kinds_of(part, (*kind, i))]
        return [kind, *inner]
    return [kind]


def _subsets(kinds: Sequence[_Kind]) -> list[frozenset[_Kind]]:
    """Return the sets of kinds to split further than is hoped for, the small ones first."""
    ones = [frozenset({kind}) for kind in kinds]
    return [frozenset(), *ones, frozenset(kinds)]


def _way_of(cache: Any, place: _Kind, split: frozenset[_Kind]) -> CacheWay:
    kind = (*place, type(cache).__name__)
    if is_list(cache):
        if kind in split:
            return CacheWay(Way.MODULE)
        parts = tuple(_way_of(part, (*kind, i), split) for i, part in enumerate(cache.caches))
        return CacheWay(Way.MODULE, parts=parts)
    if class_of(cache).is_state:
        return CacheWay(Way.MODULE, is_stacked=kind not in split)
    if not hasattr(cache, "update_and_fetch"):
        return CacheWay(Way.MODULE)
    if kind in split:
        return CacheWay(Way.MODULE)
    return CacheWay(Way.ATTENTION, is_entered=class_of(cache).masks_chunks)
