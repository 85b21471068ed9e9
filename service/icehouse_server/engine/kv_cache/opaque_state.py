"""Opaque states: caches of classes without an entry, copied whole through their `state`.

An unknown class is trusted only as far as it can be proved: its state must contain arrays and plain
scalars, a copy made by `from_state` must equal the live cache in every attribute, and it must not
take part in batches. Anything else is refused. Inference thread only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.engine.kv_cache.regions import can_store
from icehouse_server.errors import IcehouseError, Reason


class CacheUnsupported(IcehouseError):
    """A cache class can be neither cut nor copied whole; the model serves without prefix reuse."""

    def __init__(self, cache_class: str, why: str) -> None:
        super().__init__(
            Reason.CACHE_UNSUPPORTED,
            f"Cache class {cache_class} {why}; the model is served without prefix reuse",
            metadata={"cache_class": cache_class},
        )


def check_copyable(cache_type: type) -> None:
    """Raise CacheUnsupported unless the class has a readable state and a way back from it."""
    state = getattr(cache_type, "state", None)
    if not isinstance(state, property):
        raise CacheUnsupported(cache_type.__name__, "is unknown and has no state")
    if not callable(getattr(cache_type, "from_state", None)) or state.fset is None:
        raise CacheUnsupported(cache_type.__name__, "is unknown and cannot be made from its state")
    if hasattr(cache_type, "merge"):
        # Its batch form might pass for a single one, or come back from a batch as another class.
        raise CacheUnsupported(cache_type.__name__, "is unknown and can be merged into a batch")


def cut(cache: Any) -> list[tuple[str, mx.array]]:
    """Return (suffix, array) pairs, suffixes ascending, of the whole state now.

    Raises CacheUnsupported when the class proves not to be made of its state alone.
    """
    owner = type(cache).__name__
    state = cache.state
    copy = type(cache).from_state(state)
    if not _equal(vars(copy), vars(cache)):
        raise CacheUnsupported(owner, "keeps more than its state says")
    arrays: list[mx.array] = []
    tree = _encode(state, arrays, owner=owner)
    encoded = np.frombuffer(json.dumps(tree).encode(), dtype=np.uint8)
    named = [(f"state.{index:04d}", mx.contiguous(array)) for index, array in enumerate(arrays)]
    return [("state", mx.array(encoded)), *named]


def rebuild(cache_type: Any, arrays: Mapping[str, mx.array]) -> Any:
    """Return a cache of this class with the state that `cut` took.

    Raises KeyError or ValueError when arrays are missing or damaged.
    """
    tree = json.loads(np.asarray(arrays["state"]).tobytes())
    return cache_type.from_state(_decode(tree, arrays))


def _encode(value: Any, arrays: list[mx.array], *, owner: str) -> Any:
    if isinstance(value, mx.array):
        if not can_store(value.dtype):
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
    """Return whether two attribute values are the same; arrays by identity first, then by content."""
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
