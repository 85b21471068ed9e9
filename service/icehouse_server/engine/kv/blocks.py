"""Blocks of live caches: their regions cut out on the device and put back (inference thread)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Protocol, cast

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv.host_copy import HostCopy
from icehouse_server.engine.kv.page_region import PageRegion, copied_out, page_region
from icehouse_server.engine.kv.paged_restore import PagedRestoring, PagePlace
from icehouse_server.engine.kv.paging import Paging, table_of
from icehouse_server.engine.kv.pass_clock import PassClock
from icehouse_server.engine.kv.table import PageGroup
from icehouse_server.engine.kv_cache.cache_classes import Cache
from icehouse_server.engine.kv_cache.layout import CacheLayout, CacheUnsupported
from icehouse_server.engine.kv_cache.regions import ArrayRegion, dispatch, evaluate, from_host
from icehouse_server.engine.kv_cache.restore import Restoring
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts, RestoreInput
from icehouse_server.storage.api import KvTarget, PlannedBlock

_log = logging.getLogger("icehouse.engine")


_RESTORED_BYTES = 1 << 30
"""Put back in a step where nothing is waited for: the next pass comes behind it, 5 ms later on a Mac with
400 GB/s, which reads and writes each byte."""


class Sequences(Protocol):
    """Whoever holds the caches of open and decoding sequences."""

    def fresh_caches(self) -> list[Cache]:
        """Make empty caches, one a layer."""
        ...

    def caches(self, sequence_id: SequenceId) -> list[Cache]:
        """Return a sequence's own caches, to be read; valid until the next pass."""
        ...

    def adopt(self, sequence_id: SequenceId, caches: list[Cache], *, token_count: int) -> None:
        """Open a sequence with caches that were rebuilt and hold so many tokens."""
        ...


class RunnerBlocks:
    """Implements the prefix cache's CacheRunner. Refuses every thread but the runner's.

    Where the device `is_pipelined`, nothing waits for it: a pass is in flight, and whatever is waited for
    comes behind it. Copies are dispatched, and what reads them is dispatched later. Elsewhere they are made
    in steps, until the time that a caller has for them is over.
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
        self._restoring: dict[SequenceId, Restoring | PagedRestoring] = {}
        self.facts = CacheFacts(unsupported_detail="no model is loaded")
        """What the model's cache classes allow; true after `read_layout`."""

    def read_layout(self) -> None:
        """Learn from the model's own empty caches how they are cut."""
        try:
            self._layout = CacheLayout.of(
                self._sequences.fresh_caches(), block_token_count=self._block_token_count
            )
        except CacheUnsupported as error:
            self.facts = CacheFacts(unsupported_detail=error.message)
            _log.warning("prefix_reuse_disabled", extra={"detail": error.message})
            return
        self.facts = _facts_of(self._layout)

    def page(self, paging: Paging) -> None:
        """Cut and restore kv by pages from now on. After `measure`."""
        self._paging = paging
        self.facts = dataclasses.replace(self.facts, shares_blocks=self._group is not None)

    @property
    def _group(self) -> PageGroup | None:
        return None if self._paging is None else self._paging.unlimited

    def measure(self, caches: list[Cache], *, token_count: int) -> tuple[int, int]:
        """Return the bytes of kv a token takes and the bytes a sequence takes whatever its length.

        Read off caches that hold `token_count` tokens.
        """
        layout = self._layout
        if layout is None:
            return sum(cache.nbytes for cache in caches) // token_count, 0
        window = layout.cut_window(caches, start=0, stop=token_count).size_bytes // token_count
        fixed = window * layout.window_token_count + layout.cut_checkpoint(caches).size_bytes
        return layout.kv_bytes_per_token(caches), fixed

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        self._thread.check()
        assert self._layout is not None
        caches = self._sequences.caches(sequence_id)
        if self._group is not None and RegionKind.KV in kinds:
            others = self.cut(sequence_id, start=start, stop=stop, kinds=set(kinds) - {RegionKind.KV})
            return {RegionKind.KV: self._paged_region(caches, start=start, stop=stop), **others}
        cuts = {
            RegionKind.KV: lambda layout: layout.cut_kv(caches, start=start, stop=stop),
            RegionKind.WINDOW: lambda layout: layout.cut_window(caches, start=start, stop=stop),
            RegionKind.CHECKPOINT: lambda layout: layout.cut_checkpoint(caches),
        }
        regions = {kind: cuts[kind](self._layout) for kind in kinds}
        self._compute(regions.values())
        return dict(regions)

    def _paged_region(self, caches: list[Cache], *, start: int, stop: int) -> PageRegion:
        run = next(run for run in table_of(caches).runs if run.group.window is None)
        return page_region(run.group, run.pages_of(start, stop), token_count=stop - start)

    def begin_load(self, blocks: Sequence[PlannedBlock]) -> PagePlace | None:
        self._thread.check()
        group = self._group
        assert group is not None and self._layout is not None
        pool = group.pool
        pages = pool.take_spare(sum(pool.pages_for(block.header.token_count) for block in blocks))
        return None if pages is None else PagePlace(group, self._layout.kv_names, blocks, pages)

    def end_load(self, place: KvTarget) -> list[PageRegion]:
        self._thread.check()
        assert self._group is not None and isinstance(place, PagePlace)
        return place.regions(self._group)

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        self._thread.check()
        assert self._layout is not None
        blocks, count = restore.blocks, restore.token_count
        if self._paging is not None:
            caches = self._paging.caches(self._sequences.fresh_caches())
            self._restoring[sequence_id] = PagedRestoring(
                self._layout.parts, caches, blocks, token_count=count
            )
            return
        self._restoring[sequence_id] = self._layout.begin_restore(
            blocks, token_count=count, make_caches=self._sequences.fresh_caches
        )

    def continue_restore(self, sequence_id: SequenceId, *, budget_s: float) -> bool:
        self._thread.check()
        # Of one that fails nothing is kept: its sequence may be computed instead, and live long.
        restoring = self._restoring.pop(sequence_id)
        if self._is_pipelined:
            is_left = restoring.dispatch(limit_bytes=_RESTORED_BYTES)
        else:
            end_time = self._clock.monotonic() + budget_s
            while (is_left := restoring.step()) and self._clock.monotonic() < end_time:
                pass
        if is_left:
            self._restoring[sequence_id] = restoring
            return False
        self._sequences.adopt(sequence_id, restoring.caches, token_count=restoring.token_count)
        return True

    def forget(self, sequence_ids: Collection[SequenceId]) -> None:
        """Drop restores that are under way; ids without one are ignored."""
        for sequence_id in sequence_ids:
            self._restoring.pop(sequence_id, None)

    def clear(self) -> None:
        """Drop every restore."""
        self._restoring.clear()

    def begin_to_host(self, regions: Sequence[Region]) -> HostCopy:
        self._thread.check()
        return HostCopy(regions, [self._as_arrays(region) for region in regions], self._passes)

    def _as_arrays(self, region: Region) -> ArrayRegion:
        if not isinstance(region, PageRegion):
            return cast("ArrayRegion", region)
        assert self._group is not None and self._layout is not None
        copied = copied_out(self._group, region, self._layout.kv_names)
        self._compute([copied])
        return copied

    def from_host(self, region: HostRegion) -> Region:
        self._thread.check()
        built = from_host(region)
        self._compute([built])
        return built

    def _compute(self, regions: Collection[ArrayRegion]) -> None:
        if self._is_pipelined:
            dispatch(regions)
        else:
            evaluate(regions)


def _facts_of(layout: CacheLayout) -> CacheFacts:
    windows = [part.window_token_count for part in layout.parts if part.kind is RegionKind.WINDOW]
    return CacheFacts(
        has_kv=any(part.kind is RegionKind.KV for part in layout.parts),
        cuttable_inside=layout.cuttable_inside,
        needs_checkpoint=layout.needs_checkpoint,
        window_token_count=layout.window_token_count,
        shortest_window_token_count=min(windows, default=0),
    )
