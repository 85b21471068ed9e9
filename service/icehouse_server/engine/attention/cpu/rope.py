"""RoPE of a pass where the device has no kernel for it: angles are computed once for all layers.

MLX's CPU build makes some twenty small arrays of each call, and eleven of them are the same in every layer,
for queries and for keys: frequencies, angles, their sines and cosines. The positions of a pass are one array,
so what was computed from it is reused while the pass is built. The numbers are those of `mx.fast.rope` to the
last bit (mlx 0.32.4, `mlx/fast.cpp`). Inference thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import mlx.core as mx

Angles = tuple[mx.array, mx.array]
"""Cosines and signed sines of two numbers that turn together: what is added to each is the other times its
sine, which the first one has negative. [tokens, 1, 1, 1 or 2, dims / 2], the last two the other way round
where such numbers are neighbours."""


class RopeKind(NamedTuple):
    """What a layer's angles depend on besides positions and frequencies."""

    dims: int
    base: float | None
    scale: float
    dtype: mx.Dtype
    is_interleaved: bool


class PassAngles:
    """What the layers of the pass being built share."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._angles: dict[tuple[RopeKind, int], tuple[Angles, mx.array | None]] = {}
        """By kind of layer; frequencies are stored as well, so that no other array gets their identity."""

    def begin(self, positions: mx.array) -> None:
        """Know a pass's positions, [tokens]."""
        self._positions = positions

    def end(self) -> None:
        self._positions = None
        self._angles.clear()

    def takes(self, array: mx.array, offset: Any) -> bool:
        """Whether this is [tokens, heads, 1, size] of the pass, at its positions."""
        known = self._positions
        if known is None or offset is not known:
            return False
        return array.ndim == 4 and array.shape[2] == 1 and array.shape[0] == known.size

    def of(self, kind: RopeKind, freqs: mx.array | None) -> Angles:
        key = (kind, id(freqs))
        if key not in self._angles:
            self._angles[key] = self._computed(kind, freqs), freqs
        return self._angles[key][0]

    def _computed(self, kind: RopeKind, freqs: mx.array | None) -> Angles:
        assert self._positions is not None
        scale = mx.array(kind.scale, mx.float32)
        positions = self._positions.astype(mx.float32)[:, None, None, None] * scale
        if freqs is None:
            assert kind.base is not None, "RoPE has a base or frequencies"
            half = kind.dims // 2
            step = mx.array(math.log(kind.base) / half, mx.float32)
            inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * step)
        else:
            inverse = mx.reciprocal(freqs).astype(mx.float32)
        theta = positions * inverse
        cos, sin = mx.cos(theta).astype(kind.dtype), mx.sin(theta).astype(kind.dtype)
        # Neighbours turn together, or numbers half the dims apart.
        axis = -1 if kind.is_interleaved else -2
        return mx.expand_dims(cos, axis), mx.stack([-sin, sin], axis=axis)


PASS_ANGLES: Final = PassAngles()
"""Of the pass being built; empty between passes, which one thread builds."""


def rope_over(upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return what shares the angles within a pass, else does what `mx.fast.rope` does."""

    def rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: Any,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        if stream is not None or not PASS_ANGLES.takes(a, offset):
            options = {"traditional": traditional, "base": base, "scale": scale, "offset": offset}
            return upstream(a, dims, **options, freqs=freqs, stream=stream)
        kind = RopeKind(dims, base, scale, a.dtype, traditional)
        return _rotated(a, kind, PASS_ANGLES.of(kind, freqs))

    return rope


def _rotated(array: mx.array, kind: RopeKind, angles: Angles) -> mx.array:
    """Turn in three operations where upstream takes seven: -(a * b) is a * -b to the last bit."""
    cos, sin = angles
    dims, heads = kind.dims, array.shape[:-1]
    turning = array[..., :dims] if dims < array.shape[-1] else array
    pairs = turning.reshape(*heads, *((dims // 2, 2) if kind.is_interleaved else (2, dims // 2)))
    others = pairs[..., ::-1] if kind.is_interleaved else pairs[..., ::-1, :]
    turned = (pairs * cos + others * sin).reshape(*heads, dims)
    return mx.concatenate([turned, array[..., dims:]], axis=-1) if dims < array.shape[-1] else turned
