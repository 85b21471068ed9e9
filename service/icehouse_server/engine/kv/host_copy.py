"""Host copy: regions on their way to host memory, behind what the device is at (inference thread)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from icehouse_server.device import find_backend
from icehouse_server.domain.blocks import HostRegion, Region
from icehouse_server.engine.kv.pass_clock import PassClock
from icehouse_server.engine.kv_cache.regions import ArrayRegion, to_host


class HostCopy:
    """Implements the prefix cache's HostCopy. Pages are copied. Other arrays are read where they are, if that
    is memory of the host: elsewhere to look at them would move them there for good."""

    def __init__(self, regions: Sequence[Region], arrays: Sequence[ArrayRegion], passes: PassClock) -> None:
        """`arrays` of these regions are computed, or were dispatched by now."""
        self._regions = regions
        """Pages that nobody refers to are written to again, by who knows nothing of this copy."""
        self._arrays = arrays
        self._passes = passes
        self._before = passes.dispatched
        self._is_unified = find_backend().has_unified_memory

    @property
    def is_done(self) -> bool:
        """Whether a pass that was dispatched behind it has ended, or none is in flight."""
        ended = self._passes.ended
        return ended > self._before or ended == self._passes.dispatched

    def take(self) -> tuple[HostRegion, ...]:
        views = tuple(map(to_host, self._arrays))
        return views if self._is_unified else tuple(map(_copied, views))

    @property
    def is_apart(self) -> bool:
        if not self._is_unified:
            return True
        return all(own is not array for own, array in zip(self._regions, self._arrays, strict=True))


def _copied(region: HostRegion) -> HostRegion:
    """Return the region in memory of its own."""
    tensors = (dataclasses.replace(each, data=np.array(each.data).data) for each in region.tensors)
    return HostRegion(region.kind, tuple(tensors))
