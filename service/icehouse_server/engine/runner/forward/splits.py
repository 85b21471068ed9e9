"""Splits: how the layers of a model keep the rows of a pass apart; `probe` finds which one a model allows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from icehouse_server.domain.model import PassSplit
from icehouse_server.engine.kv_cache.cache_classes import PlainKv, class_of, is_list


class NotSplittable(Exception):
    """A model uses its caches in a way that this split cannot support for several rows."""


class Attention(enum.Enum):
    """How rows attend."""

    AUTO = "auto"
    """All together over pages of one pool, if the model's KV can be in pages and the device's attention over
    them is proved; otherwise like `ROWS`."""
    ROWS = "rows"
    """Each over caches of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSplit:
    """How one cache of a model is served."""

    mode: PassSplit
    """ATTENTION: everything around `scaled_dot_product_attention` is computed for all tokens at once. MODULE:
    each row calls the module that takes the cache; decoding rows may share a call on stacked states."""
    is_stacked: bool = False
    """Decoding rows share a call of the module, on stacked states."""
    is_entered: bool = False
    """The model's body reads this cache's offset as a number. It gets 0; its attention gets the positions."""
    parts: tuple[CacheSplit, ...] = ()
    """For a CacheList whose parts are served one by one; otherwise empty."""

    @property
    def needs_door(self) -> bool:
        """Whether a module that takes this cache splits the rows, or is given their positions."""
        if self.parts:
            return any(part.needs_door for part in self.parts)
        return self.is_entered or self.mode is PassSplit.MODULE

    def leaf_modes(self) -> tuple[PassSplit, ...]:
        return tuple(mode for part in self.parts for mode in part.leaf_modes()) or (self.mode,)


@dataclasses.dataclass(frozen=True, slots=True)
class PassFacts:
    """What `probe` found about one model."""

    caches: tuple[CacheSplit, ...]
    """One for each cache of `make_prompt_cache`; empty if rows run alone."""
    hidden_size: int = 0
    """Width of the hidden states, of which the head reads only the wanted ones; 0 if there are none, and then
    logits are picked from those of all tokens."""
    can_take_back: bool = False
    """Whether speculation is possible: every cache class can take tokens back."""
    layer_count: int = 0
    """How many layers a chunk may go through a few at a time; 0 if it must go through all in one pass."""
    layers_are_joined: bool = False
    """Whether layers that read the same input are computed as one product (`joined_layers`)."""
    reason: str = ""
    """Why the split is not a better one: the error of each that was tried before."""

    @property
    def modes(self) -> tuple[PassSplit, ...]:
        """The modes in use, in the order of the enum; ALONE if each row is a call of the model."""
        modes = {mode for cache in self.caches for mode in cache.leaf_modes()}
        return tuple(mode for mode in PassSplit if mode in modes) or (PassSplit.ALONE,)

    @property
    def attending_indices(self) -> list[int]:
        """Which of a row's caches are served by attention alone."""
        return [
            index
            for index, split in enumerate(self.caches)
            if split.mode is PassSplit.ATTENTION and not split.parts and not split.is_entered
        ]

    def kv_count(self, caches: Sequence[Any]) -> int:
        """Return how many of a row's caches are KV of unlimited context that attention serves; 0 if rows run
        alone."""
        return sum(
            split.mode is PassSplit.ATTENTION and not split.parts and isinstance(class_of(cache), PlainKv)
            for split, cache in zip(self.caches, caches, strict=False)
        )


def candidates(caches: Sequence[Any]) -> list[tuple[CacheSplit, ...]]:
    """Return the splits to try for a model with such caches, best first.

    Each kind of cache (its class and its index in a list) is served alike in all layers, by attention if
    possible.
    """
    kinds = sorted({kind for cache in caches for kind in _kinds_of(cache, ())}, key=str)
    choices = [frozenset(), *(frozenset({kind}) for kind in kinds), frozenset(kinds)]
    plans = [tuple(_split_of(cache, (), by_module) for cache in caches) for by_module in choices]
    return list(dict.fromkeys(plans))


_Kind = tuple[object, ...]


def _kinds_of(cache: Any, index: _Kind) -> list[_Kind]:
    kind = (*index, type(cache).__name__)
    parts = cache.caches if is_list(cache) else ()
    return [kind, *(inner for i, part in enumerate(parts) for inner in _kinds_of(part, (*kind, i)))]


def _split_of(cache: Any, index: _Kind, by_module: frozenset[_Kind]) -> CacheSplit:
    """Return how a cache is served if these kinds are served by their modules."""
    kind = (*index, type(cache).__name__)
    if not is_list(cache) and class_of(cache).is_state:
        return CacheSplit(PassSplit.MODULE, is_stacked=kind not in by_module)
    if kind in by_module or not (is_list(cache) or hasattr(cache, "update_and_fetch")):
        return CacheSplit(PassSplit.MODULE)
    if is_list(cache):
        parts = tuple(_split_of(part, (*kind, i), by_module) for i, part in enumerate(cache.caches))
        return CacheSplit(PassSplit.MODULE, parts=parts)
    return CacheSplit(PassSplit.ATTENTION, is_entered=class_of(cache).masks_chunks)
