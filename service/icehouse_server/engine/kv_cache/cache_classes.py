"""Cache classes of mlx-lm: one entry each, for everything done to a cache outside the model.

An entry knows how its class stores KV in mlx-lm 0.32 (`mlx_lm/models/cache.py`): which kind of region it
becomes, where its tokens are, how it is rebuilt and quantized, and how guessed tokens are taken back. A class
without an entry is refused, and so is a subclass, which may store differently: its model is served without
prefix reuse. A new class needs an entry and a row in its test; CacheList has no entry.

Rebuilt caches continue exactly as uninterrupted ones would, bit for bit. Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS, TokenArrays
from icehouse_server.errors import IcehouseError, Reason, model_invalid

Cache = Any
"""One layer's cache: KVCache, RotatingKVCache, ArraysCache, CacheList, ..."""

Arrays = Mapping[str, mx.array]
"""A cache's arrays by suffix ("k", "v", "state.0000"), evaluated and with no other owner."""

Undo = Callable[[], None]


class CacheUnsupported(IcehouseError):
    """A cache class can be neither cut nor copied whole; the model is served without prefix reuse."""

    def __init__(self, cache_class: str, why: str) -> None:
        super().__init__(
            Reason.CACHE_UNSUPPORTED,
            f"Cache class {cache_class} {why}; the model is served without prefix reuse",
            metadata={"cache_class": cache_class},
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CacheClass:
    """An entry. `tokens` is for cutting by tokens, `whole` for taking a checkpoint."""

    cache_type: type

    kind: ClassVar[RegionKind]
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the arrays that are cut by tokens, ascending."""
    is_state: ClassVar[bool] = False
    """A state in slots: several can be stacked, and only `mark` takes tokens back."""
    is_plain: ClassVar[bool] = False
    """Keys and values of every token, in arrays with the tokens first and spare capacity after them."""
    masks_chunks: ClassVar[bool] = False
    """A token sees only its own chunk of the context; models read the offset as a number to mask the rest."""

    @property
    def name(self) -> str:
        return self.cache_type.__name__

    @property
    def step_token_count(self) -> int:
        """Number of tokens by which such caches grow, copying each time; any number will do for states."""
        return int(getattr(self.cache_type, "step", KVCache.step))

    def of_other(self, cache: Cache) -> Cache | None:
        """Return an empty cache that does what mlx-vlm's class of this name does; None if there is none."""
        return None

    def check(self, cache: Cache) -> None:
        """Raise CacheUnsupported if this cache can be neither cut nor copied whole."""

    def window_token_count(self, cache: Cache) -> int:
        """Length of the sliding window; 0 for other kinds."""
        return 0

    def tokens(self, cache: Cache) -> TokenArrays:
        """Describe where the tokens of one sequence's cache are; for kv and window."""
        raise AssertionError(f"{self.name} has no tokens that can be cut")

    def whole(self, cache: Cache) -> list[tuple[str, mx.array]]:
        """Return (suffix, array) pairs of the current state, suffixes ascending."""
        raise AssertionError(f"{self.name} is cut by tokens")

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        """Return a cache that has seen this many tokens; `empty` is used up.

        K/V arrays are [1, heads, slots, width]: those of kv have the tokens first and may have more slots,
        those of a window hold its last tokens in temporal order. Raises KeyError, IndexError or ValueError if
        arrays are missing or damaged.
        """
        raise AssertionError(f"{self.name} does not say how it is rebuilt")

    def quantized(self, empty: Cache, *, bits: int, group_size: int) -> Cache:
        """Return an empty cache that keeps the same in fewer bits, or `empty` itself if there is none."""
        return empty

    def can_rewind(self, cache: Cache) -> bool:
        """Return whether tokens that were fed together can be taken back."""
        return False

    @property
    def is_cut_before_guesses(self) -> bool:
        """Whether a cache can be cut at its known tokens while it holds guesses after them."""
        return self.kind is RegionKind.KV

    def rewind(self, cache: Cache, count: int) -> None:
        """Take back the last `count` tokens, fewer than the last pass fed."""
        raise AssertionError(f"{self.name} takes no tokens back")

    def mark(self, cache: Cache) -> Undo:
        """Remember where the cache is. The result undoes every update since, of any number of tokens."""
        raise AssertionError(f"{self.name} takes no tokens back")

    def stacked(self, caches: Sequence[Cache]) -> Cache:
        """Return one cache with a row for each of these states, which stay as they are."""
        raise AssertionError(f"{self.name} is no state")


class TokenCache(CacheClass):
    """A cache with keys and values of each token, from which the last tokens can be taken back."""

    __slots__ = ()
    suffixes: ClassVar[tuple[str, ...]] = ("k", "v")

    def tokens(self, cache: Cache) -> TokenArrays:
        return TokenArrays() if cache.keys is None else self._tokens(cache)

    def _tokens(self, cache: Cache) -> TokenArrays:
        return TokenArrays(_keys_and_values(cache), 0, cache.offset, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.keys, empty.values = arrays["k"], arrays["v"]
        empty.offset = token_count
        return empty

    def can_rewind(self, cache: Cache) -> bool:
        return True

    def rewind(self, cache: Cache, count: int) -> None:
        taken = cache.trim(count)
        assert taken == count, f"{self.name} took back {taken} of {count} tokens"


class PlainKv(TokenCache):
    """KVCache: K/V of unlimited context, in place with spare capacity. A rewind only moves its offset."""

    __slots__ = ()
    kind = RegionKind.KV
    is_plain: ClassVar[bool] = True

    def of_other(self, cache: Cache) -> Cache | None:
        return self.cache_type()

    def quantized(self, empty: Cache, *, bits: int, group_size: int) -> Cache:
        return QuantizedKVCache(group_size=group_size, bits=bits)

    def mark(self, cache: Cache) -> Undo:
        offset = cache.offset
        return lambda: self.rewind(cache, cache.offset - offset)


class QuantizedKv(PlainKv):
    """QuantizedKVCache: the same with three arrays for keys and three for values, stored as they are."""

    __slots__ = ()
    suffixes = ("k", "k.biases", "k.scales", "v", "v.biases", "v.scales")
    is_plain = False

    def of_other(self, cache: Cache) -> Cache | None:
        return None

    def _tokens(self, cache: Cache) -> TokenArrays:
        (keys, key_scales, key_biases), (values, value_scales, value_biases) = cache.keys, cache.values
        arrays = (keys, key_biases, key_scales, values, value_biases, value_scales)
        return TokenArrays(tuple(zip(self.suffixes, arrays, strict=True)), 0, cache.offset, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.keys = (arrays["k"], arrays["k.scales"], arrays["k.biases"])
        empty.values = (arrays["v"], arrays["v.scales"], arrays["v.biases"])
        empty.offset = token_count
        return empty

    def quantized(self, empty: Cache, *, bits: int, group_size: int) -> Cache:
        return empty


class ChunkedKv(TokenCache):
    """ChunkedKVCache: K/V of the latest chunk and more; the front is cut off before each pass.

    So a pass's own tokens can be taken back: the chunk before them is still there.
    """

    __slots__ = ()
    kind = RegionKind.WINDOW
    masks_chunks = True

    def window_token_count(self, cache: Cache) -> int:
        return int(cache.chunk_size)

    def _tokens(self, cache: Cache) -> TokenArrays:
        return TokenArrays(_keys_and_values(cache), 0, cache.offset - cache.start_position, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        cache = super().rebuild(empty, arrays, token_count=token_count)
        # What maybe_trim_front would leave at the start of the next forward pass.
        cache.start_position = token_count - cache.keys.shape[TOKEN_AXIS]
        return cache

    def mark(self, cache: Cache) -> Undo:
        return _undo_of(cache, "offset", "start_position")


class RotatingKv(TokenCache):
    """RotatingKVCache: K/V of a sliding window, linear until it is full and a ring from then on.

    A pass of several tokens puts it in temporal order, with a full window of earlier tokens first. So nothing
    has been overwritten if some of the new tokens are taken back.
    """

    __slots__ = ()
    kind = RegionKind.WINDOW

    def of_other(self, cache: Cache) -> Cache | None:
        return self.cache_type(max_size=cache.max_size, keep=cache.keep)

    def check(self, cache: Cache) -> None:
        if cache.keep:
            raise CacheUnsupported(self.name, f"keeps its first {cache.keep} tokens for ever")

    def window_token_count(self, cache: Cache) -> int:
        return int(cache.max_size)

    def _tokens(self, cache: Cache) -> TokenArrays:
        tensors, slots = _keys_and_values(cache), cache.keys.shape[TOKEN_AXIS]
        if cache._idx == slots or cache._idx >= cache.offset:
            return TokenArrays(tensors, 0, cache._idx, cache.offset)
        return TokenArrays(tensors, cache._idx, slots, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        cache = super().rebuild(empty, arrays, token_count=token_count)
        cache._idx = cache.keys.shape[TOKEN_AXIS]
        return cache

    def can_rewind(self, cache: Cache) -> bool:
        return not cache.keep

    def rewind(self, cache: Cache, count: int) -> None:
        keys, values = cache.keys_and_values()
        cache.keys, cache.values = keys[..., :-count, :], values[..., :-count, :]
        cache.offset -= count
        cache._idx -= count

    def mark(self, cache: Cache) -> Undo:
        return _undo_of(cache, "offset", "_idx")


class SlottedState(CacheClass):
    """ArraysCache: a recurrent or convolution state in slots, known only at the sequence's current token."""

    __slots__ = ()
    kind = RegionKind.CHECKPOINT
    is_state = True

    def of_other(self, cache: Cache) -> Cache | None:
        return self.cache_type(size=len(cache.cache))

    def whole(self, cache: Cache) -> list[tuple[str, mx.array]]:
        assert cache.lengths is None, "The batch is in the middle of a padded prefill"
        # Merging empty caches leaves zeros here, which count down below zero: that means no padding.
        padding = cache.left_padding
        assert padding is None or (np.asarray(padding) <= 0).all(), "Padding is still to come"
        # An unused slot is stored too, as an empty array, so that a missing one is never mistaken for it.
        unused = mx.zeros((0,), mx.uint8)
        return [
            (f"{slot:02d}", unused if array is None else mx.contiguous(array))
            for slot, array in enumerate(cache.cache)
        ]

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        for slot in range(len(empty.cache)):
            array = arrays[f"{slot:02d}"]
            empty[slot] = array if array.ndim > 1 else None
        return empty

    def mark(self, cache: Cache) -> Undo:
        arrays = list(cache.cache)

        def undo() -> None:
            cache.cache = arrays

        return undo

    def stacked(self, caches: Sequence[Cache]) -> Cache:
        rows: Any = ArraysCache(len(caches[0].cache))
        rows.cache = [
            None if arrays[0] is None else mx.concatenate(list(arrays), axis=0)
            for arrays in zip(*(cache.cache for cache in caches), strict=True)
        ]
        return rows


class UnknownCache(CacheClass):
    """A class without an entry."""

    __slots__ = ()
    kind = RegionKind.CHECKPOINT

    def check(self, cache: Cache) -> None:
        raise CacheUnsupported(self.name, "is unknown")


CACHE_CLASSES: Final[Mapping[type, CacheClass]] = {
    entry.cache_type: entry
    for entry in (
        PlainKv(KVCache),
        QuantizedKv(QuantizedKVCache),
        ChunkedKv(ChunkedKVCache),
        RotatingKv(RotatingKVCache),
        SlottedState(ArraysCache),
    )
}
"""Entries for all of mlx-lm's cache classes that this server supports."""


def class_of(cache: Cache) -> CacheClass:
    """Return the entry of a cache that is not a CacheList; this server's own classes have `cache_class`."""
    kind = type(cache)
    own: CacheClass | None = getattr(kind, "cache_class", None)
    return own or CACHE_CLASSES.get(kind) or UnknownCache(kind)


def make_caches(model: Any) -> list[Cache]:
    """Return empty caches, one per layer, of the classes the model asks for.

    mlx-vlm has classes of its own with the same names. A model that asks for these gets mlx-lm's, which
    blocks can be cut from. Raises ModelError for a class that is unknown here.
    """
    return [_of_mlx_lm(cache) for cache in make_prompt_cache(model)]


def quantize_caches(caches: Sequence[Cache], *, bits: int, group_size: int) -> list[Cache]:
    """Return these fresh caches, replaced by quantized ones where these exist; lists are changed."""
    chosen = list(caches)
    for cache, path in list(leaves_at(caches)):
        put(chosen, path, class_of(cache).quantized(cache, bits=bits, group_size=group_size))
    return chosen


def step_token_count(caches: Sequence[Cache]) -> int:
    """Return the most tokens by which any of these caches grows; each time, whole layers are copied."""
    return max((class_of(leaf).step_token_count for leaf in leaves(caches)), default=1)


def _of_mlx_lm(cache: Cache) -> Cache:
    kind = type(cache)
    if not kind.__module__.startswith("mlx_vlm."):
        return cache
    entry = next((each for each in CACHE_CLASSES.values() if each.name == kind.__name__), None)
    empty = None if entry is None else entry.of_other(cache)
    if empty is None:
        raise model_invalid(f"the model's layers use mlx-vlm's {kind.__name__}, which is not supported")
    return empty


def is_list(cache: Cache) -> bool:
    """Return whether a cache only contains others, in its `caches`."""
    return type(cache) is CacheList


def leaves(caches: Sequence[Cache]) -> Iterator[Cache]:
    """Yield every cache that is not a CacheList, depth first."""
    return (leaf for leaf, _ in leaves_at(caches))


def leaves_at(caches: Sequence[Cache], path: tuple[int, ...] = ()) -> Iterator[tuple[Cache, tuple[int, ...]]]:
    """Yield every cache that is not a CacheList, and its path, depth first."""
    assert len(caches) <= (10 if path else 1000), f"Names of {len(caches)} caches would not sort"
    for index, cache in enumerate(caches):
        if is_list(cache):
            yield from leaves_at(cache.caches, (*path, index))
        else:
            yield cache, (*path, index)


def leaf(caches: Sequence[Any], path: tuple[int, ...]) -> Any:
    """Return the cache at this path, which may lead through CacheLists."""
    cache = caches[path[0]]
    for index in path[1:]:
        cache = cache.caches[index]
    return cache


def mark(caches: Sequence[Cache]) -> list[Undo]:
    """Remember where these caches are; each must be a state, or able to take tokens back."""
    return [class_of(leaf).mark(leaf) for leaf in leaves(caches)]


def put(caches: list[Any], path: tuple[int, ...], cache: Any) -> None:
    """Set the cache at this path, which may lead through CacheLists."""
    if len(path) == 1:
        caches[path[0]] = cache
        return
    parent = leaf(caches, path[:-1])
    parent.caches = tuple(cache if i == path[-1] else c for i, c in enumerate(parent.caches))


@dataclasses.dataclass(frozen=True, slots=True)
class CachePart:
    """One cache of a model that is not a list: its path, class and window."""

    name: str
    """"007", or "007.1" inside a CacheList; the prefix of its tensors' names."""
    path: tuple[int, ...]
    cache_class: CacheClass
    window_token_count: int = 0
    """Length of the sliding window; 0 for other kinds."""

    @property
    def kind(self) -> RegionKind:
        return self.cache_class.kind


def parts_of(caches: Sequence[Cache]) -> Iterator[CachePart]:
    """Yield every cache that is not a CacheList, depth first.

    Raises CacheUnsupported, naming the class that can be neither cut nor copied whole.
    """
    for cache, path in leaves_at(caches):
        entry = class_of(cache)
        entry.check(cache)
        name = ".".join([f"{path[0]:03d}", *map(str, path[1:])])
        yield CachePart(name, path, entry, entry.window_token_count(cache))


def _keys_and_values(cache: Cache) -> tuple[tuple[str, mx.array], ...]:
    return (("k", cache.keys), ("v", cache.values))


def _undo_of(cache: Cache, *names: str) -> Undo:
    # New array objects, since an update writes into those of the cache.
    before = {"keys": cache.keys[...], "values": cache.values[...]}
    before |= {name: getattr(cache, name) for name in names}
    return lambda: cache.__dict__.update(before)
