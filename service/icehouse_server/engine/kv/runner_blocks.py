"""Runner blocks: regions of blocks cut from live caches on the device, and restored (inference thread)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from icehouse_server.clock import Clock
from icehouse_server.device import find_backend
from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv.page_table import PageGroup
from icehouse_server.engine.kv.paged_cache import Paging, table_of
from icehouse_server.engine.kv.paged_rebuild import PageDestination, PagedRebuild, PageRegion
from icehouse_server.engine.kv.pass_clock import PassClock
from icehouse_server.engine.kv_cache.cache_classes import Cache
from icehouse_server.engine.kv_cache.layout import CacheLayout
from icehouse_server.engine.kv_cache.opaque_state import CacheUnsupported
from icehouse_server.engine.kv_cache.rebuild import CacheRebuild
from icehouse_server.engine.kv_cache.regions import ArrayRegion, compute, from_host, to_host
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, RestoreInput
from icehouse_server.storage.api import KvPlace, PlannedBlock

_log = logging.getLogger("icehouse.engine")

_RESTORED_BYTES = 1 << 30
"""Restored in a step that waits for nothing: it delays the next pass by 5 ms on a Mac with 400 GB/s, which
reads and writes each byte."""


class Sequences(Protocol):
    """The caches of open and decoding sequences."""

    def fresh_caches(self) -> list[Cache]:
        """Make empty caches, one a layer."""
        ...

    def caches(self, sequence_id: SequenceId) -> list[Cache]:
        """Return a sequence's own caches, to be read; valid until the next pass."""
        ...

    def adopt(self, sequence_id: SequenceId, caches: list[Cache], *, token_count: int) -> None:
        """Open a sequence with rebuilt caches of so many tokens."""
        ...


class RunnerBlocks:
    """Implements the prefix cache's CacheRunner. Refuses every thread but the runner's.

    Where the device `is_pipelined`, nothing waits for it: a pass is in flight, and a wait would include that
    pass. Copies are dispatched, and whatever reads them is dispatched later. Elsewhere they are computed step
    by step, within the caller's time budget.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        block_token_count: int,
        is_pipelined: bool,
        clock: Clock,
        thread: OneThread,
        passes: PassClock,
    ) -> None:
        self._sequences = sequences
        self._block_token_count = block_token_count
        self._is_pipelined = is_pipelined
        self._clock = clock
        self._thread = thread
        self._passes = passes
        self._layout: CacheLayout | None = None
        self._paging: Paging | None = None
        """Set where kv lies in pages."""
        self._restoring: dict[SequenceId, CacheRebuild] = {}
        self.facts = CacheFacts(unsupported_detail="no model is loaded")
        """What the model's cache classes allow; true after `read_layout`."""

    def read_layout(self) -> None:
        """Learn from the model's own empty caches how they are cut."""
        try:
            layout = CacheLayout.of(self._sequences.fresh_caches(), block_token_count=self._block_token_count)
        except CacheUnsupported as error:
            self.facts = CacheFacts(unsupported_detail=error.message)
            _log.warning("prefix_reuse_disabled", extra={"detail": error.message})
            return
        self._layout = layout
        windows = layout.window_token_counts
        self.facts = CacheFacts(
            has_kv=layout.has_kv,
            cuttable_inside=layout.cuttable_inside,
            needs_checkpoint=layout.needs_checkpoint,
            window_token_count=max(windows, default=0),
            shortest_window_token_count=min(windows, default=0),
        )

    def page(self, paging: Paging) -> None:
        """Cut and restore kv by pages from now on. After `measure`."""
        self._paging = paging
        self.facts = dataclasses.replace(self.facts, shares_blocks=self._group is not None)

    @property
    def _group(self) -> PageGroup | None:
        return None if self._paging is None else self._paging.unlimited

    def measure(self, caches: list[Cache], *, token_count: int) -> tuple[int, int]:
        """Return the bytes of kv that a token takes, and the bytes that a sequence takes whatever its length.

        Measured on caches of `token_count` tokens.
        """
        layout = self._layout
        if layout is None:
            return sum(cache.nbytes for cache in caches) // token_count, 0
        window = (
            layout.cut_tokens(RegionKind.WINDOW, caches, start=0, stop=token_count).size_bytes // token_count
        )
        fixed = window * self.facts.window_token_count + layout.cut_checkpoint(caches).size_bytes
        return layout.kv_bytes_per_token(caches), fixed

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        self._thread.check()
        layout, caches = self._layout, self._sequences.caches(sequence_id)
        assert layout is not None
        regions: dict[RegionKind, Region] = {}
        copies: list[ArrayRegion] = []
        for kind in kinds:
            if kind is RegionKind.KV and self._group is not None:
                run = next(run for run in table_of(caches).runs if run.group.window is None)
                pages = run.pages_of(start, stop)
                regions[kind] = PageRegion.of(run.group, pages, token_count=stop - start)
                continue
            if kind is RegionKind.CHECKPOINT:
                copies.append(layout.cut_checkpoint(caches))
            else:
                copies.append(layout.cut_tokens(kind, caches, start=start, stop=stop))
            regions[kind] = copies[-1]
        self._compute(copies)
        return regions

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> PageDestination | None:
        self._thread.check()
        group = self._group
        assert group is not None and self._layout is not None
        pool = group.pool
        pages = pool.take_spare(sum(pool.pages_for(block.header.token_count) for block in blocks))
        return None if pages is None else PageDestination(group, self._layout.kv_names, blocks, pages)

    def end_load(self, place: KvPlace) -> list[PageRegion]:
        self._thread.check()
        assert self._group is not None and isinstance(place, PageDestination)
        return place.regions(self._group)

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        self._thread.check()
        layout, caches = self._layout, self._sequences.fresh_caches()
        assert layout is not None
        if self._paging is None:
            rebuild = layout.begin_rebuild(restore.blocks, caches, token_count=restore.token_count)
        else:
            caches = self._paging.caches(caches)
            rebuild = PagedRebuild(layout.parts, caches, restore.blocks, token_count=restore.token_count)
        self._restoring[sequence_id] = rebuild

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        self._thread.check()
        # A failed rebuild must not stay: its sequence may be computed instead, and live long.
        rebuild = self._restoring.pop(sequence_id)
        if self._is_pipelined:
            _dispatch_parts(rebuild)
        else:
            end_time = self._clock.monotonic() + budget_s
            while not rebuild.is_done:
                mx.eval(rebuild.next_part())
                if self._clock.monotonic() >= end_time:
                    break
        if not rebuild.is_done:
            self._restoring[sequence_id] = rebuild
            return False
        self._sequences.adopt(sequence_id, rebuild.caches, token_count=rebuild.token_count)
        return True

    def forget(self, sequence_ids: Collection[SequenceId]) -> None:
        """Drop restores that are under way; ids without one are ignored."""
        for sequence_id in sequence_ids:
            self._restoring.pop(sequence_id, None)

    def clear(self) -> None:
        """Drop every restore."""
        self._restoring.clear()

    def begin_to_host(self, regions: Sequence[Region]) -> RegionCopy:
        self._thread.check()
        return RegionCopy(regions, [self._as_arrays(region) for region in regions], self._passes)

    def _as_arrays(self, region: Region) -> ArrayRegion:
        if not isinstance(region, PageRegion):
            return cast("ArrayRegion", region)
        assert self._group is not None and self._layout is not None
        copied = region.copied_out(self._group, self._layout.kv_names)
        self._compute([copied])
        return copied

    def from_host(self, region: HostRegion) -> Region:
        self._thread.check()
        built = from_host(region)
        self._compute([built])
        return built

    def _compute(self, regions: Collection[ArrayRegion]) -> None:
        compute(regions, waits=not self._is_pipelined)


class RegionCopy:
    """Implements the prefix cache's HostCopy. Pages are copied. Other arrays are read in place where that is
    host memory; on other devices, reading them there would move them to the host for good."""

    def __init__(self, regions: Sequence[Region], arrays: Sequence[ArrayRegion], passes: PassClock) -> None:
        """`arrays` of these regions are computed or dispatched."""
        self._regions = regions
        """Keeps their pages: a page without a reference is written to again."""
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


def _dispatch_parts(rebuild: CacheRebuild) -> None:
    """Have parts of about `_RESTORED_BYTES` computed, at least one, behind the device's current work."""
    arrays: list[mx.array] = []
    size_bytes = 0
    while not rebuild.is_done and (not arrays or size_bytes < _RESTORED_BYTES):
        part = rebuild.next_part()
        arrays += part
        size_bytes += sum(array.nbytes for array in part)
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]
