"""Cutting a block's kv out of live caches a layer at a time, so that a decode step is not held up for all.

K/V of unlimited context is only ever appended to, so a block that is complete can be cut over many
steps, from whichever batch its sequence is in by then. Inference thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from service.domain.blocks import RegionKind
from service.kv.layout import CacheLayout
from service.kv.layout_held import held
from service.kv.layout_parts import leaf
from service.kv.layout_regions import ArrayRegion


class KvCutting:
    """Tokens [start, stop) of one sequence on their way into a region."""

    def __init__(self, layout: CacheLayout, *, start: int, stop: int) -> None:
        self._parts = [part for part in layout.parts if part.kind is RegionKind.KV]
        self._start = start
        self._stop = stop
        self._arrays: list[tuple[str, mx.array]] = []
        self._done_count = 0

    @property
    def is_done(self) -> bool:
        return self._done_count == len(self._parts)

    def step(self, caches: Sequence[Any], *, row: int) -> None:
        """Copy the next layer's tokens, evaluated."""
        part = self._parts[self._done_count]
        arrays = held(leaf(caches, part.path), row=row).cut(self._start, self._stop)
        mx.eval([array for _, array in arrays])
        self._arrays += [(f"{part.name}.{suffix}", array) for suffix, array in arrays]
        self._done_count += 1

    def region(self) -> ArrayRegion:
        """Return the whole region; only when done."""
        assert self.is_done, f"{self._done_count} of {len(self._parts)} layers are cut"
        return ArrayRegion(RegionKind.KV, tuple(self._arrays))
