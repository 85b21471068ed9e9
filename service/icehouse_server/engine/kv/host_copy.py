"""Host copy: regions on their way to host memory, behind what the device is at (inference thread)."""

from __future__ import annotations

from collections.abc import Sequence

from icehouse_server.domain.blocks import HostRegion, Region
from icehouse_server.engine.kv.pass_clock import PassClock
from icehouse_server.engine.kv_cache.regions import ArrayRegion, to_host


class HostCopy:
    """Implements the prefix cache's HostCopy: pages are copied, arrays are read where they are."""

    def __init__(self, regions: Sequence[Region], arrays: Sequence[ArrayRegion], passes: PassClock) -> None:
        """`arrays` of these regions are computed, or were dispatched by now."""
        self._regions = regions
        """Pages that nobody refers to are written to again, by who knows nothing of this copy."""
        self._arrays = arrays
        self._passes = passes
        self._before = passes.dispatched

    @property
    def is_done(self) -> bool:
        """Whether a pass that was dispatched behind it has ended, or none is in flight."""
        ended = self._passes.ended
        return ended > self._before or ended == self._passes.dispatched

    def take(self) -> tuple[HostRegion, ...]:
        return tuple(map(to_host, self._arrays))

    @property
    def is_apart(self) -> bool:
        return all(own is not array for own, array in zip(self._regions, self._arrays, strict=True))
