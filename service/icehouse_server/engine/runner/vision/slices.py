"""Slices of a vision tower: an image goes through it in pieces, so that rows decode between any two of them
(inference thread).

A piece is what attention, a feed-forward block or another linear layer gives for as many patches as a device
computes in a few milliseconds. How long pieces take is learned as they run, so that a step begins none that
its time has no room for, and computes several together if it has.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from icehouse_server.device import Backend, find_backend
from icehouse_server.engine.runner.forward.model_seam import become

_CPU_WORK: Final = 1 << 25
_GPU_WORK: Final = 1 << 34
"""Most multiplications of a piece. On 2 x86 cores, which have no fused kernel, this many took attention 5 ms
and feed-forward blocks 2 ms."""
_LEAST_COUNT: Final = 16
"""Fewest patches of a piece, however long they take."""
_FEED_FORWARD: Final = "MLP"
"""How the names of mlx-vlm's feed-forward classes end."""
_PADDED_ATTENTION: Final = "ensure_fused_sdpa"
"""In mlx_vlm.models.base: pads heads to a size that MLX has a kernel for."""
_OVERHEAD_SHARE: Final = 1.0 / 64.0
"""What a piece takes besides its arithmetic, relative to the time of a longest piece."""
_LEAST_S: Final = 1e-6
"""Nothing takes less; a clock that says so was read at the wrong moment."""


@dataclasses.dataclass(frozen=True, slots=True)
class TowerSlice:
    """One piece, computed from those before it."""

    array: mx.array
    kind: str
    work: float
    """Multiplications, plus as many as its overhead is worth."""


class TowerSlicer:
    """Collects the pieces while a graph is built. mlx-vlm's tower is called as it is; only inside `slicing`
    do its linear layers, its feed-forward blocks and MLX's attention function compute piece by piece."""

    def __init__(self, whole: Any, *, piece_work: int | None = None) -> None:
        """Change the layers of a model that take each patch separately, except in the text half."""
        self._piece_work = piece_work or (_CPU_WORK if find_backend() is Backend.CPU else _GPU_WORK)
        self._slices: collections.deque[TowerSlice] | None = None
        """None while nothing is to be cut: outside of `slicing`, and inside a piece."""
        self._attention_owners = [(mx.fast, "scaled_dot_product_attention"), *_padded_attention(whole)]
        for module in _token_wise_modules(whole, ""):
            kind = "linear" if _is_linear(module) else "feed_forward"
            become(module, "tower", functools.partial(self._token_wise, kind, _weight_count(module)))

    @contextmanager
    def slicing(self) -> Iterator[collections.deque[TowerSlice]]:
        """Yield the pieces of what is built in the block, in order."""
        slices: collections.deque[TowerSlice] = collections.deque()
        upstream = [(owner, name, getattr(owner, name)) for owner, name in self._attention_owners]
        self._slices = slices
        # Nobody else uses MLX meanwhile, since there is one inference thread.
        for owner, name, call in upstream:
            setattr(owner, name, self._attention_over(call))
        try:
            yield slices
        finally:
            self._slices = None
            for owner, name, call in upstream:
                setattr(owner, name, call)

    def _token_wise(
        self, kind: str, weight_count: int, call: Callable[[mx.array], mx.array], inputs: mx.array
    ) -> mx.array:
        """Return the output of a layer with this many weights for [..., patches, width], patch by patch."""
        if self._slices is None or inputs.ndim < 2:
            return call(inputs)
        work = math.prod(inputs.shape[:-1]) * weight_count
        return self._joined(
            kind, inputs.shape[-2], work, lambda start, stop: call(inputs[..., start:stop, :])
        )

    def _attention_over(self, upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def attention(queries: Any, keys: Any, values: Any, scale: float, **options: Any) -> mx.array:
            mask = options.get("mask")
            if self._slices is None or isinstance(mask, str):
                return upstream(queries, keys, values, scale=scale, **options)
            by_query = mask if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1 else None

            def part(start: int, stop: int) -> mx.array:
                own = {} if by_query is None else {"mask": by_query[..., start:stop, :]}
                return upstream(queries[..., start:stop, :], keys, values, scale=scale, **options | own)

            work = 2 * math.prod(queries.shape) * keys.shape[-2]
            return self._joined("attention", queries.shape[-2], work, part)

        return attention

    def _joined(self, kind: str, count: int, work: int, part: Callable[[int, int], mx.array]) -> mx.array:
        """Return `part` of this many patches, in pieces of similar length."""
        slices = self._slices
        assert slices is not None
        piece_count = max(1, min(math.ceil(work / self._piece_work), count // _LEAST_COUNT))
        stops = [count * (i + 1) // piece_count for i in range(piece_count)]
        # What is called inside may be compiled, and arrays that a compiler traces with cannot be computed.
        self._slices = None
        try:
            pieces = [part(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        finally:
            self._slices = slices
        overhead = _OVERHEAD_SHARE * self._piece_work
        slices += [TowerSlice(piece, kind, work / piece_count + overhead) for piece in pieces]
        return pieces[0] if piece_count == 1 else mx.concatenate(pieces, axis=-2)


class TowerPace:
    """Learns how long pieces of each kind take."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        """Seconds per unit of work."""

    def take(
        self, slices: collections.deque[TowerSlice], *, left_s: float, may_wait: bool
    ) -> list[TowerSlice]:
        """Take the next pieces that fit into `left_s`; without `may_wait`, at least one.

        A piece of a kind that never ran is taken alone.
        """
        taken: list[TowerSlice] = []
        while slices:
            rate = self._rates.get(slices[0].kind)
            left_s -= 0.0 if rate is None else rate * slices[0].work
            is_wanted = not may_wait and not taken
            if not is_wanted and (left_s < 0.0 or (rate is None and taken)):
                break
            taken.append(slices.popleft())
            if rate is None:
                break
        return taken

    def note(self, taken: list[TowerSlice], elapsed_s: float) -> None:
        """Learn from pieces that were computed together."""
        elapsed_s = max(elapsed_s, _LEAST_S)
        first = taken[0]
        if first.kind not in self._rates:
            self._rates[first.kind] = elapsed_s / first.work
            return
        expected_s = sum(self._rates[piece.kind] * piece.work for piece in taken)
        for kind in {piece.kind for piece in taken}:
            self._rates[kind] *= elapsed_s / expected_s


def _padded_attention(whole: Any) -> Iterator[tuple[Any, str]]:
    """Yield the modules from which a tower gets mlx-vlm's own attention function, which is compiled."""
    for name in sorted({base.__module__ for _, each in whole.named_modules() for base in type(each).__mro__}):
        if hasattr(owner := sys.modules[name], _PADDED_ATTENTION):
            yield owner, _PADDED_ATTENTION


def _token_wise_modules(module: Any, name: str) -> Iterator[Any]:
    """Yield the outermost layers of a tower that take each patch separately."""
    if name == "language_model":
        return
    if _is_linear(module) or type(module).__name__.endswith(_FEED_FORWARD):
        yield module
        return
    for child_name, child in module.children().items():
        for each in _modules_in(child):
            yield from _token_wise_modules(each, child_name)


def _modules_in(child: Any) -> Iterator[Any]:
    if isinstance(child, Module):
        yield child
    elif isinstance(child, list | tuple | dict):
        for each in child.values() if isinstance(child, dict) else child:
            yield from _modules_in(each)


def _is_linear(module: Any) -> bool:
    return isinstance(module, Linear | QuantizedLinear)


def _weight_count(module: Any) -> int:
    """Return how many weights a patch is multiplied with."""
    linear = [inner for _, inner in module.named_modules() if _is_linear(inner)]
    return sum(inner.weight.size * (32 // inner.bits if hasattr(inner, "bits") else 1) for inner in linear)
