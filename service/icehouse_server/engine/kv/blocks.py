"""Blocks of live caches: their regions cut out on the device and put back (inference thread)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from typing import Protocol, cast

import mlx.core as mx

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import HostRegion, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv.host_copy import HostCopy
from icehouse_server.engine.kv.page_region import PageRegion, copied_out, page_region, put_in
from icehouse_server.engine.kv.paged_restore import PageCutting, PagedRestoring
from icehouse_server.engine.kv.paging import Paging, table_of
from icehouse_server.engine.kv.pass_clock import PassClock
from icehouse_server.engine.kv.table import PageGroup
from icehouse_server.engine.kv_cache.cache_classes import Cache
from icehouse_server.engine.kv_cache.layout import CacheLayout, CacheUnsupported, KvCutting
from icehouse_server.engine.kv_cache.load_target import KvShape, KvTarget
from icehouse_server.engine.kv_cache.regions import ArrayRegion, dispatch, evaluate, from_host
from icehouse_server.engine.kv_cache.restore import LoadedKv, RestoreBlock, RestoreSource, Restoring
from icehouse_server.engine.prefix_cache.tiers.ports import CacheFacts, RestoreInput
from icehouse_server.engine.prefix_cache.tiers.ports import KvCutting as KvCuttingPort
from icehouse_server.engine.prefix_cache.tiers.ports import KvTarget as KvTargetPort

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
        self._kv_shapes: tuple[KvShape, ...] = ()
        self._paging: Paging | None = None
        """Set where kv lies in pages."""
        self._lent_places: frozenset[int] = frozenset()
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

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        """The tensors of the kv region, after `measure`."""
        return self._kv_shapes

    def page(self, paging: Paging) -> None:
        """Cut and restore kv by pages from now on. After `measure`."""
        self._paging = paging
        self.facts = dataclasses.replace(
            self.facts,
            least_lent_token_count=1,
            shares_captures=self._group is not None,
        )

    @property
    def _group(self) -> PageGroup | None:
        return None if self._paging is None else self._paging.unlimited

    @property
    def kv_dtypes(self) -> frozenset[mx.Dtype]:
        """Of what is kept of each token, after `measure`."""
        return frozenset(shape.dtype for shape in self._kv_shapes)

    def lend(self, places: Collection[int], *, least_token_count: int) -> None:
        """Let restored sequences of so many tokens and more read, in the caches at these places, what blocks
        in RAM hold where it is. After `measure`; only where attention takes `Segments`."""
        assert self._kv_shapes and least_token_count >= 1
        self._lent_places = frozenset(places)
        self.facts = dataclasses.replace(self.facts, least_lent_token_count=least_token_count)

    def measure(self, caches: list[Cache], *, token_count: int) -> tuple[int, int]:
        """Return the bytes of kv a token takes and the bytes a sequence takes whatever its length.

        Read off caches that hold `token_count` tokens.
        """
        layout = self._layout
        if layout is None:
            return sum(cache.nbytes for cache in caches) // token_count, 0
        window = layout.cut_window(caches, start=0, stop=token_count).size_bytes // token_count
        self._kv_shapes = layout.kv_shapes(caches)
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

    def begin_cut(self, *, start: int, stop: int) -> KvCutting | PageCutting:
        self._thread.check()
        assert self._layout is not None
        if self._group is not None:
            return PageCutting(start, stop)
        return KvCutting(self._layout, start=start, stop=stop)

    def continue_cut(
        self, sequence_id: SequenceId, cutting: KvCuttingPort, *, budget_s: float
    ) -> Region | None:
        self._thread.check()
        caches = self._sequences.caches(sequence_id)
        if isinstance(cutting, PageCutting):
            return self._paged_region(caches, start=cutting.start, stop=cutting.stop)
        assert isinstance(cutting, KvCutting)
        if self._is_pipelined:
            region = cutting.cut_at_once(caches)
            dispatch([region])
            return region
        end_time = self._clock.monotonic() + budget_s
        while not cutting.is_done:
            cutting.step(caches)
            if self._clock.monotonic() >= end_time:
                break
        return cutting.region() if cutting.is_done else None

    def begin_target(self, *, capacity_token_count: int) -> KvTarget:
        self._thread.check()
        assert self._kv_shapes, "kv is wanted of a model that was seen to have none"
        return KvTarget(self._kv_shapes, capacity_token_count=capacity_token_count)

    def continue_target(self, target: KvTargetPort, *, budget_s: float) -> bool:
        self._thread.check()
        assert isinstance(target, KvTarget)
        end_time = self._clock.monotonic() + budget_s
        while not target.is_made:
            target.step()
            if not self._is_pipelined and self._clock.monotonic() >= end_time:
                break
        return target.is_made

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        self._thread.check()
        assert self._layout is not None
        if self._paging is not None:
            self._restoring[sequence_id] = PagedRestoring(
                self._layout.parts,
                self._paging.caches(self._sequences.fresh_caches()),
                _source_of(restore),
                token_count=restore.token_count,
            )
            return
        self._restoring[sequence_id] = self._layout.begin_restore(
            _source_of(restore),
            token_count=restore.token_count,
            capacity_token_count=restore.capacity_token_count,
            make_caches=self._sequences.fresh_caches,
            lent_places=self._lent_places if self.facts.lends(restore.token_count) else (),
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
        assert self._group is not None
        copied = copied_out(self._group, region, [shape.name for shape in self._kv_shapes])
        self._compute([copied])
        return copied

    def from_host(self, region: HostRegion) -> Region:
        self._thread.check()
        if self._group is not None and region.kind is RegionKind.KV:
            return put_in(self._group, region)
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


def _source_of(restore: RestoreInput) -> RestoreSource:
    blocks = tuple(
        RestoreBlock(
            start_token_index=block.start_token_index,
            token_count=block.token_count,
            kv=block.regions.get(RegionKind.KV),
            window=cast("ArrayRegion | None", block.regions.get(RegionKind.WINDOW)),
            checkpoint=cast("ArrayRegion | None", block.regions.get(RegionKind.CHECKPOINT)),
        )
        for block in restore.blocks
    )
    if restore.loaded is None or restore.target is None:
        return RestoreSource(blocks)
    target = cast("KvTarget", restore.target)
    loaded = LoadedKv(
        target,
        restore.origin_token_index,
        restore.loaded.end_token_index,
        first_token_index=restore.target_origin_token_index,
    )
    return RestoreSource(blocks, loaded)
