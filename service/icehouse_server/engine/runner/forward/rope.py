"""RoPE of a pass where the device has no kernel for it: angles are computed once for all layers.

MLX's CPU build makes some twenty small arrays of each call, and eleven of them are the same in every layer,
for queries and for keys: frequencies, angles, their sines and cosines. The positions of a pass are one array,
so what was made of it is kept while the pass is built. These are the operations of `mx.fast.rope` in its
order, so the numbers are the same to the last bit (mlx 0.32.4, `mlx/fast.cpp`). Inference thread only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

Angles = tuple[mx.array, mx.array]
"""Cosines and sines, [tokens, 1, 1, dims / 2]."""


class PassAngles:
    """What the layers of the pass being built share."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._found: dict[tuple[Any, ...], tuple[Angles, mx.array | None]] = {}
        """By kind of layer; frequencies are kept, so that no other array gets their identity."""

    def begin(self, positions: mx.array) -> None:
        """Know a pass's positions, [tokens]."""
        self._positions = positions

    def end(self) -> None:
        """Let go of them."""
        self._positions = None
        self._found.clear()

    def takes(self, array: mx.array, offset: Any) -> bool:
        """Whether this is [tokens, heads, 1, size] of the pass, at its positions."""
        known = self._positions
        if known is None or offset is not known:
            return False
        return array.ndim == 4 and array.shape[2] == 1 and array.shape[0] == known.size

    def of(
        self, dims: int, *, base: float | None, scale: float, freqs: mx.array | None, dtype: mx.Dtype
    ) -> Angles:
        """Return the angles of one kind of layer."""
        key = (dims, base, scale, id(freqs), dtype)
        if key not in self._found:
            self._found[key] = self._computed(dims, base, scale, freqs, dtype), freqs
        return self._found[key][0]

    def _computed(
        self, dims: int, base: float | None, scale: float, freqs: mx.array | None, dtype: mx.Dtype
    ) -> Angles:
        assert self._positions is not None
        positions = self._positions.astype(mx.float32)[:, None, None, None] * mx.array(scale, mx.float32)
        if freqs is None:
            assert base is not None, "RoPE has a base or frequencies"
            step = mx.array(math.log(base) / (dims // 2), mx.float32)
            inverse = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * step)
        else:
            inverse = mx.reciprocal(freqs).astype(mx.float32)
        theta = positions * inverse
        return mx.cos(theta).astype(dtype), mx.sin(theta).astype(dtype)


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
        angles = PASS_ANGLES.of(dims, base=base, scale=scale, freqs=freqs, dtype=a.dtype)
        return _rotated(a, dims, angles, is_interleaved=traditional)

    return rope


def _rotated(array: mx.array, dims: int, angles: Angles, *, is_interleaved: bool) -> mx.array:
    cos, sin = angles
    if is_interleaved:
        first, second = array[..., 0:dims:2], array[..., 1:dims:2]
    else:
        first, second = array[..., : dims // 2], array[..., dims // 2 : dims]
    turned = [first * cos - second * sin, first * sin + second * cos]
    if is_interleaved:
        turned = [mx.stack(turned, axis=-1).reshape(*array.shape[:-1], dims)]
    if dims < array.shape[-1]:
        turned.append(array[..., dims:])
    return mx.concatenate(turned, axis=-1) if len(turned) > 1 else turned[0]
