"""Cache classes of mlx-lm: one entry each, with all that is done to a cache otherwise than by the model.

An entry knows the storage of its class in mlx-lm 0.32 (`mlx_lm/models/cache.py`): which kind of region it
is kept in, where its tokens lie, how it is put back, quantized, and how guessed tokens are taken back.
A class without an entry is kept whole by its state, if that can be proved to be enough (`opaque_state`); a
subclass counts as such a class, because it may store differently. A new class is an entry in
`CACHE_CLASSES` and a row in its test. CacheList is no entry: it only holds other caches.

Rebuilt caches continue as uninterrupted ones would, bit for bit. Inference thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv_cache import opaque_state
from icehouse_server.engine.kv_cache.batch_forms import BatchForm, KvBatch, RotatingBatch
from icehouse_server.engine.kv_cache.held import Held, keys_and_values, none_held
from icehouse_server.engine.kv_cache.opaque_state import CacheUnsupported
from icehouse_server.engine.kv_cache.regions import TOKEN_AXIS

Cache = Any
"""One layer's cache: KVCache, RotatingKVCache, ArraysCache, CacheList, ... or its batch form."""

Arrays = Mapping[str, mx.array]
"""A cache's arrays by suffix ("k", "v", "state.0000"), evaluated and nobody else's."""

Undo = Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheClass:
    """What every entry answers. Tokens are cut by `held`, a checkpoint is taken by `whole`."""

    cache_type: type
    batch_form: BatchForm | None = None
    """What it is merged into; None where mlx-lm cannot."""

    kind: ClassVar[RegionKind]
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Of the arrays that are cut by tokens, ascending."""

    @property
    def name(self) -> str:
        return self.cache_type.__name__

    @property
    def step_token_count(self) -> int:
        """Tokens by which such caches grow, each being copied then; of states, any number will do."""
        return int(getattr(self.cache_type, "step", KVCache.step))

    def check(self, cache: Cache) -> None:
        """Raise CacheUnsupported when this cache can neither be cut nor held."""

    def window_token_count(self, cache: Cache) -> int:
        """Length of the sliding window; 0 for the other kinds."""
        return 0

    def facts(self, cache: Cache) -> tuple[int, ...]:
        """What must be equal for a restore, beside class and window."""
        return ()

    def held(self, cache: Cache) -> Held:
        """Describe where the tokens of one sequence's cache lie; of kv and window."""
        raise AssertionError(f"{self.name} holds no tokens that can be cut")

    def held_row(self, cache: Cache, *, row: int) -> Held:
        """Describe one row of a cache or of its batch form; single caches have row 0 only."""
        form = self.batch_form
        if form is not None and type(cache) is form.cache_type:
            return form.held(cache, row=row)
        assert type(cache) is self.cache_type and row == 0, (self.name, type(cache), row)
        return self.held(cache)

    def whole(self, cache: Cache, *, row: int) -> list[tuple[str, mx.array]]:
        """Return (suffix, array) pairs, suffixes ascending, of one row's state now; of checkpoints.

        Raises CacheUnsupported when the class proves to keep more than can be read.
        """
        raise AssertionError(f"{self.name} is cut by tokens (row {row})")

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        """Return a cache that has seen so many tokens; `empty` is used up.

        K/V arrays are [1, heads, slots, width]: those of kv have the tokens in front and may have more
        slots, those of a window hold its last tokens in temporal order. Raises KeyError, IndexError or
        ValueError when arrays are missing or damaged.
        """
        raise NotImplementedError(self.name)

    def quantized(self, empty: Cache, *, bits: int, group_size: int) -> Cache:
        """Return the cache that keeps the same in fewer bits, or `empty` itself where there is none."""
        return empty

    def can_rewind(self, cache: Cache) -> bool:
        """Tell whether tokens that were fed together can be taken back."""
        return False

    def rewind(self, cache: Cache, count: int) -> None:
        """Take the last `count` tokens back, fewer than were fed in the last pass."""
        raise AssertionError(f"{self.name} takes no tokens back")

    def mark(self, cache: Cache) -> Undo:
        """Remember where the cache stands; the result undoes every update since, of any number of tokens."""
        raise AssertionError(f"{self.name} takes no tokens back")


class PlainKv(CacheClass):
    """KVCache: K/V of unlimited context, in place with spare room. Taking back moves only its offset."""

    __slots__ = ()
    kind = RegionKind.KV
    suffixes: ClassVar[tuple[str, ...]] = ("k", "v")

    def held(self, cache: Cache) -> Held:
        if cache.keys is None:
            return none_held()
        return Held(keys_and_values(cache), 0, 0, cache.offset, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.keys, empty.values = arrays["k"], arrays["v"]
        empty.offset = token_count
        return empty

    def quantized(self, empty: Cache, *, bits: int, group_size: int) -> Cache:
        return QuantizedKVCache(group_size=group_size, bits=bits)

    def can_rewind(self, cache: Cache) -> bool:
        return True

    def rewind(self, cache: Cache, count: int) -> None:
        taken = cache.trim(count)
        assert taken == count, f"{self.name} took back {taken} of {count} tokens"

    def mark(self, cache: Cache) -> Undo:
        offset = cache.offset
        return lambda: self.rewind(cache, cache.offset - offset)


class QuantizedKv(PlainKv):
    """QuantizedKVCache: the same with three arrays for keys and three for values, kept as they are."""

    __slots__ = ()
    suffixes = ("k", "k.biases", "k.scales", "v", "v.biases", "v.scales")

    def facts(self, cache: Cache) -> tuple[int, ...]:
        return cache.group_size, cache.bits

    def held(self, cache: Cache) -> Held:
        if cache.keys is None:
            return none_held()
        (keys, key_scales, key_biases), (values, value_scales, value_biases) = cache.keys, cache.values
        arrays = (keys, key_biases, key_scales, values, value_biases, value_scales)
        return Held(tuple(zip(self.suffixes, arrays, strict=True)), 0, 0, cache.offset, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.keys = (arrays["k"], arrays["k.scales"], arrays["k.biases"])
        empty.values = (arrays["v"], arrays["v.scales"], arrays["v.biases"])
        empty.offset = token_count
        return empty

    def quantized(self, empty: Cache, *, bits: int, group_size: int) -> Cache:
        return empty


class ChunkedKv(CacheClass):
    """ChunkedKVCache: K/V of the latest chunk and more, its front cut off before each pass."""

    __slots__ = ()
    kind = RegionKind.WINDOW
    suffixes = ("k", "v")

    def window_token_count(self, cache: Cache) -> int:
        return int(cache.chunk_size)

    def held(self, cache: Cache) -> Held:
        if cache.keys is None:
            return none_held()
        count = cache.offset - cache.start_position
        return Held(keys_and_values(cache), 0, 0, count, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.keys, empty.values = arrays["k"], arrays["v"]
        empty.offset = token_count
        # What maybe_trim_front leaves at the start of the next forward pass, done already.
        empty.start_position = token_count - empty.keys.shape[TOKEN_AXIS]
        return empty


class RotatingKv(CacheClass):
    """RotatingKVCache: K/V of a sliding window, linear until it is full and a ring from then on.

    A pass of several tokens puts it in temporal order, after a full window of those before, so nothing
    is overwritten yet when some of them are taken back.
    """

    __slots__ = ()
    kind = RegionKind.WINDOW
    suffixes = ("k", "v")

    def check(self, cache: Cache) -> None:
        if cache.keep:
            raise CacheUnsupported(self.name, f"keeps its first {cache.keep} tokens for ever")

    def window_token_count(self, cache: Cache) -> int:
        return int(cache.max_size)

    def held(self, cache: Cache) -> Held:
        if cache.keys is None:
            return none_held()
        tensors, slots = keys_and_values(cache), cache.keys.shape[TOKEN_AXIS]
        if cache._idx == slots or cache._idx >= cache.offset:
            return Held(tensors, 0, 0, cache._idx, cache.offset)
        return Held(tensors, 0, cache._idx, slots, cache.offset)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        empty.keys, empty.values = arrays["k"], arrays["v"]
        empty.offset = token_count
        empty._idx = empty.keys.shape[TOKEN_AXIS]
        return empty

    def can_rewind(self, cache: Cache) -> bool:
        return not cache.keep

    def rewind(self, cache: Cache, count: int) -> None:
        keys, values = cache.keys_and_values()
        cache.keys, cache.values = keys[..., :-count, :], values[..., :-count, :]
        cache.offset -= count
        cache._idx -= count

    def mark(self, cache: Cache) -> Undo:
        # New array objects: an update writes into the ones that the cache has.
        arrays = cache.keys[...], cache.values[...]
        numbers = cache.offset, cache._idx

        def undo() -> None:
            cache.keys, cache.values = arrays
            cache.offset, cache._idx = numbers

        return undo


class SlottedState(CacheClass):
    """ArraysCache: a recurrent or convolution state in slots, known only where the sequence stands."""

    __slots__ = ()
    kind = RegionKind.CHECKPOINT

    def facts(self, cache: Cache) -> tuple[int, ...]:
        return (len(cache.cache),)

    def whole(self, cache: Cache, *, row: int) -> list[tuple[str, mx.array]]:
        assert cache.lengths is None, "The batch is in the middle of a padded prefill"
        # A merge of empty caches leaves zeros here, which count down below zero: no padding at all.
        padding = cache.left_padding
        assert padding is None or np.asarray(padding)[row] <= 0, "Padding is still to come"
        # An unused slot is written too, as an array of no rows: a missing one must never pass for it.
        unused = mx.zeros((0,), mx.uint8)
        return [
            (f"{slot:02d}", unused if array is None else mx.contiguous(array[row : row + 1]))
            for slot, array in enumerate(cache.cache)
        ]

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        for slot in range(len(empty.cache)):
            array = arrays[f"{slot:02d}"]
            empty[slot] = array if array.ndim > 1 else None
        return empty


class OpaqueState(CacheClass):
    """A class without an entry, kept by its `state` where that is proved to be all of it."""

    __slots__ = ()
    kind = RegionKind.CHECKPOINT

    def check(self, cache: Cache) -> None:
        opaque_state.check_holdable(self.cache_type)

    def whole(self, cache: Cache, *, row: int) -> list[tuple[str, mx.array]]:
        assert row == 0, f"{self.name} has no rows"
        return opaque_state.cut(cache)

    def rebuild(self, empty: Cache, arrays: Arrays, *, token_count: int) -> Cache:
        return opaque_state.rebuild(self.cache_type, arrays)


CACHE_CLASSES: Final[Mapping[type, CacheClass]] = {
    entry.cache_type: entry
    for entry in (
        PlainKv(KVCache, KvBatch(BatchKVCache)),
        QuantizedKv(QuantizedKVCache),
        ChunkedKv(ChunkedKVCache),
        RotatingKv(RotatingKVCache, RotatingBatch(BatchRotatingKVCache)),
        SlottedState(ArraysCache, BatchForm(ArraysCache)),
    )
}
"""All that this server knows of mlx-lm's cache classes."""

_BATCH_FORMS: Final = {
    entry.batch_form.cache_type: entry.batch_form for entry in CACHE_CLASSES.values() if entry.batch_form
}


def class_of(cache: Cache) -> CacheClass:
    """Return the entry of a cache that is not a CacheList; a class without one is opaque."""
    kind = type(cache)
    entry = CACHE_CLASSES.get(kind)
    # Whatever can be merged, mlx-lm runs in batches; it is only never cut.
    return entry or OpaqueState(kind, BatchForm(kind) if hasattr(kind, "merge") else None)


def batch_form_of(batch: Cache) -> BatchForm:
    """Return the form of a batch that is not a CacheList."""
    kind = type(batch)
    return _BATCH_FORMS.get(kind) or BatchForm(kind)


def leaves(caches: Sequence[Cache]) -> Iterator[Cache]:
    """Yield every cache that is not a CacheList, depth first."""
    return (leaf for leaf, _ in _leaves_at(caches, ()))


def _leaves_at(caches: Sequence[Cache], path: tuple[int, ...]) -> Iterator[tuple[Cache, tuple[int, ...]]]:
    assert len(caches) <= (10 if path else 1000), f"Names of {len(caches)} caches would not sort"
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            yield from _leaves_at(cache.caches, (*path, index))
        else:
            yield cache, (*path, index)


def make_caches(model: Any) -> list[Cache]:
    """Return empty caches, one a layer, of the classes the model asks for."""
    return list(make_prompt_cache(model))


def quantize_caches(caches: Sequence[Cache], *, bits: int, group_size: int) -> list[Cache]:
    """Return these fresh caches, those that have a quantized form replaced by it; lists are changed."""
    chosen = list(caches)
    for leaf, path in list(_leaves_at(caches, ())):
        put(chosen, path, class_of(leaf).quantized(leaf, bits=bits, group_size=group_size))
    return chosen


def cache_states(caches: Sequence[Cache]) -> list[Any]:
    """Return the arrays that hold the caches' contents, for one eval."""
    return [cache.state for cache in caches]


def step_token_count(caches: Sequence[Cache]) -> int:
    """Return by how many tokens these caches grow at a time, at most."""
    return max((class_of(leaf).step_token_count for leaf in leaves(caches)), default=1)


def leaf(caches: Sequence[Any], path: tuple[int, ...]) -> Any:
    """Return the cache at this place, inside CacheLists where the path goes on."""
    cache = caches[path[0]]
    for index in path[1:]:
        cache = cache.caches[index]
    return cache


def put(caches: list[Any], path: tuple[int, ...], cache: Any) -> None:
    """Set the cache at this place, inside CacheLists where the path goes on."""
    if len(path) == 1:
        caches[path[0]] = cache
        return
    parent = leaf(caches, path[:-1])
    parent.caches = tuple(cache if i == path[-1] else c for i, c in enumerate(parent.caches))


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One cache of a model that is not a list: its place, its class, and what a restore must find equal."""

    name: str
    """"007", or "007.1" inside a CacheList; prefix of its tensors' names."""
    path: tuple[int, ...]
    cache_class: CacheClass
    window_token_count: int = 0
    """Length of the sliding window; 0 for the other kinds."""
    facts: tuple[int, ...] = ()
    """What must be equal for a restore: (group size, bits), slots of an ArraysCache."""

    @property
    def kind(self) -> RegionKind:
        return self.cache_class.kind


def parts_of(caches: Sequence[Cache]) -> Iterator[Part]:
    """Yield every cache that is not a CacheList, depth first.

    Raises CacheUnsupported naming the class that can neither be cut nor held.
    """
    for cache, path in _leaves_at(caches, ()):
        entry = class_of(cache)
        entry.check(cache)
        name = ".".join([f"{path[0]:03d}", *map(str, path[1:])])
        yield Part(name, path, entry, entry.window_token_count(cache), entry.facts(cache))
