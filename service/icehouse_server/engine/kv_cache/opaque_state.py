"""Opaque state: caches that cannot be cut by tokens, kept whole (ArraysCache, and unknown classes).

An unknown class is trusted only as far as it can be proved: its state must hold arrays and plain
scalars, a copy made by `from_state` must equal the live cache in every attribute, and it must not
take part in batches. Anything else is refused. Inference thread only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from icehouse_server.engine.kv_cache.regions import can_hold
from icehouse_server.errors import IcehouseError, Reason


class CacheUnsupported(IcehouseError):
    """A cache class can neither be cut nor held whole; the model serves without prefix reuse."""

    def __init__(self, cache_class: str, why: str) -> None:
        super().__init__(
            Reason.CACHE_UNSUPPORTED,
            f"Cache class {cache_class} {why}; the model is served without prefix reuse",
            metadata={"cache_class": cache_class},
        )


def check_holdable(cache: Any) -> None:
    """Raise CacheUnsupported unless the class has a readable state and a way back from it."""
    kind = type(cache)
    if kind is ArraysCache:
        return
    state = getattr(kind, "state", None)
    if not isinstance(state, property):
        raise CacheUnsupported(kind.__name__, "is unknown and has no state")
    if not callable(getattr(kind, "from_state", None)) or state.fset is None:
        raise CacheUnsupported(kind.__name__, "is unknown and cannot be made from its state")
    if hasattr(kind, "merge"):
        # Its batch form might pass for a single one, or come back from a batch as another class.
        raise CacheUnsupported(kind.__name__, "is unknown and can be merged into a batch")


def cut_whole(cache: Any) -> list[tuple[str, mx.array]]:
    """Return (suffix, array) pairs, suffixes ascending, of the whole state now.

    Raises CacheUnsupported when an unknown class proves not to be made of its state alone.
    """
    if type(cache) is ArraysCache:
        return _cut_arrays_cache(cache)
    state = cache.state
    copy = type(cache).from_state(state)
    if not _equal(vars(copy), vars(cache)):
        raise CacheUnsupported(type(cache).__name__, "keeps more than its state says")
    arrays: list[mx.array] = []
    tree = _encode(state, arrays, owner=type(cache).__name__)
    encoded = np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8)
    named = [(f"state.{index:04d}", mx.contiguous(array)) for index, array in enumerate(arrays)]
    return [("state", mx.array(encoded)), *named]


def rebuild_whole(template: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Return an evaluated cache of the template's class with the state that `cut_whole` took.

    The template is used up. Raises KeyError or ValueError when arrays are missing or damaged.
    """
    # New array objects: assigning into a cache must never reach a block's own array.
    own = {suffix: mx.contiguous(array) for suffix, array in arrays.items()}
    mx.eval(own)
    if type(template) is ArraysCache:
        for slot in range(len(template.cache)):
            array = own[f"{slot:02d}"]
            template[slot] = array if array.ndim > 1 else None
        return template
    tree = json.loads(np.asarray(own["state"]).tobytes())
    return type(template).from_state(_decode(tree, own))


def _cut_arrays_cache(cache: Any) -> list[tuple[str, mx.array]]:
    assert cache.lengths is None, "The batch is in the middle of a padded prefill"
    # A merge of empty caches leaves zeros here, which count down below zero: no padding at all.
    assert cache.left_padding is None or (np.asarray(cache.left_padding) <= 0).all(), (
        "Padding is still to come"
    )
    # An unused slot is written too, as an array of no rows: a missing one must never pass for it.
    unused = mx.zeros((0,), mx.uint8)
    return [
        (f"{slot:02d}", unused if array is None else mx.contiguous(array))
        for slot, array in enumerate(cache.cache)
    ]


def _encode(value: Any, arrays: list[mx.array], *, owner: str) -> Any:
    if isinstance(value, mx.array):
        if not can_hold(value.dtype):
            raise CacheUnsupported(owner, f"has a state of dtype {value.dtype}")
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, arrays, owner=owner) for item in value]}
    raise CacheUnsupported(owner, f"has a {type(value).__name__} in its state")


def _decode(tree: Any, arrays: Mapping[str, mx.array]) -> Any:
    ((kind, content),) = tree.items()
    if kind == "array":
        return arrays[f"state.{content:04d}"]
    if kind == "value":
        return content
    items = [_decode(item, arrays) for item in content]
    return tuple(items) if kind == "tuple" else items


def _equal(left: Any, right: Any) -> bool:
    """Tell whether two attribute values are the same; arrays by identity first, then by content."""
    if left is right:
        return True
    if isinstance(left, mx.array) and isinstance(right, mx.array):
        same_kind = left.shape == right.shape and left.dtype == right.dtype
        return same_kind and bool(mx.array_equal(left, right).item())
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return type(left) in (bool, int, float, str) and left == right
