"""Runner blocks: regions of blocks, cut from live caches on the device, and restored (inference thread).

KV in pages is read from SSD directly into pages, if the host can write to them; otherwise into host memory
and from there at once into pages. So a block that was read is a block in RAM, and starting from it copies
nothing. In files and in host memory, each layer has its keys and values separately, [1, heads, tokens, size],
as in the regions of any other model (`kv_cache.regions`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from icehouse_server.clock import Clock
from icehouse_server.device import find_backend
from icehouse_server.domain.blocks import HostRegion, HostTensor, Region, RegionKind
from icehouse_server.domain.ids import SequenceId
from icehouse_server.engine.core.thread_guard import OneThread
from icehouse_server.engine.kv.page_table import PageGroup, PageRun
from icehouse_server.engine.kv.paged_cache import Paging, table_of
from icehouse_server.engine.kv.pool import Bytes, Page, PassClock, numbers_of
from icehouse_server.engine.kv_cache.cache_classes import Cache, CacheUnsupported
from icehouse_server.engine.kv_cache.cache_layout import (
    CacheLayout,
    CacheRebuild,
    TokenShape,
    check_cover,
)
from icehouse_server.engine.kv_cache.regions import ArrayRegion, compute, dtype_name, from_host, to_host
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts, PlacedBlock, RestoreInput
from icehouse_server.storage.api import KvTarget, LayoutMismatch, PlannedBlock, TensorShape

_log = logging.getLogger("icehouse.engine")

_RESTORED_BYTES = 1 << 30
"""Restored in a step that waits for nothing. It delays the next pass by 5 ms on a Mac with 400 GB/s, which
reads and writes each byte."""


class Sequences(Protocol):
    """The caches of open and decoding sequences."""

    def row_caches(self) -> list[Cache]:
        """Make the empty caches of a new row, with a page table of its own if KV is in pages."""

    def caches(self, sequence_id: SequenceId) -> list[Cache]:
        """Return a sequence's own caches for reading; valid until the next pass."""

    def adopt(self, sequence_id: SequenceId, caches: list[Cache], *, token_count: int) -> None:
        """Open a sequence with rebuilt caches of this many tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a model's KV takes."""

    bytes_per_token: int
    bytes_per_sequence: int
    """Independent of a sequence's length."""
    token_shapes: Mapping[RegionKind, tuple[TokenShape, ...]] = dataclasses.field(default_factory=dict)
    """Of kv and windows."""


class RunnerBlocks:
    """Implements the prefix cache's CacheRunner. Refuses every thread but the runner's.

    On a device that `is_pipelined`, nothing waits for the device, since a wait would include the pass in
    flight. Copies are dispatched, and whatever reads them is dispatched later. Otherwise they are computed
    step by step, within the caller's time budget.
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
        self._is_pipelined = is_pipelined
        self._clock = clock
        self._thread = thread
        self._passes = passes
        self._layout = CacheLayout((), block_token_count)
        self._group: PageGroup | None = None
        """Set if kv is in pages."""
        self.footprint = Footprint(0, 0)
        """Of this model, once it is measured."""
        self._restoring: dict[SequenceId, CacheRebuild] = {}
        self.facts = CacheFacts(unsupported_detail="no model is loaded")
        """What the model's cache classes allow; valid after `read_layout`."""

    def read_layout(self) -> None:
        """Learn from the model's empty caches how they are cut."""
        try:
            self._layout = CacheLayout.of(
                self._sequences.row_caches(), block_token_count=self._layout.block_token_count
            )
        except CacheUnsupported as error:
            self.facts = CacheFacts(unsupported_detail=error.message)
            _log.warning("prefix_reuse_disabled", extra={"detail": error.message})
            return
        self.facts = self._layout.facts

    def page(self, paging: Paging) -> None:
        """Cut and restore kv by pages from now on."""
        self._group = paging.unlimited
        self.facts = dataclasses.replace(self.facts, shares_blocks=self._group is not None)

    def measure(self, caches: list[Cache], *, token_count: int) -> Footprint:
        """Return the footprint that caches of `token_count` tokens show. After `read_layout`."""
        layout = self._layout
        if self.facts.unsupported_detail:
            return Footprint(sum(cache.nbytes for cache in caches) // token_count, 0)
        window = (
            layout.cut_tokens(RegionKind.WINDOW, caches, start=0, stop=token_count).size_bytes // token_count
        )
        fixed = window * self.facts.window_token_count + layout.cut_checkpoint(caches).size_bytes
        shapes = {kind: layout.token_shapes(kind, caches) for kind in (RegionKind.KV, RegionKind.WINDOW)}
        return Footprint(layout.kv_bytes_per_token(caches), fixed, shapes)

    def cut(
        self, sequence_id: SequenceId, *, start: int, stop: int, kinds: Collection[RegionKind]
    ) -> dict[RegionKind, Region]:
        self._thread.check()
        layout, caches = self._layout, self._sequences.caches(sequence_id)
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
        assert group is not None
        pool = group.pool
        pages = pool.take_spare(sum(pool.pages_for(block.header.token_count) for block in blocks))
        return None if pages is None else PageDestination(group, self._layout.kv_names, blocks, pages)

    def end_load(self, place: KvTarget) -> list[PageRegion]:
        self._thread.check()
        assert self._group is not None and isinstance(place, PageDestination)
        return place.regions(self._group)

    def begin_restore(self, sequence_id: SequenceId, restore: RestoreInput) -> None:
        self._thread.check()
        parts, caches, count = self._layout.parts, self._sequences.row_caches(), restore.token_count
        for run in table_of(caches).runs:
            if run.group.window is None:
                parts = tuple(part for part in parts if part.kind is not RegionKind.KV)
                _put_pages(run, restore.blocks, token_count=count)
        self._restoring[sequence_id] = CacheRebuild(parts, caches, restore.blocks, token_count=count)

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
        """Drop unfinished restores; ids without one are ignored."""
        for sequence_id in sequence_ids:
            self._restoring.pop(sequence_id, None)

    @property
    def is_restoring(self) -> bool:
        """Whether any row is being rebuilt."""
        return bool(self._restoring)

    def clear(self) -> None:
        """Drop every restore."""
        self._restoring.clear()

    def begin_to_host(self, regions: Sequence[Region]) -> RegionCopy:
        self._thread.check()
        return RegionCopy(regions, [self._copied(region) for region in regions], self._passes)

    def _copied(self, region: Region) -> ArrayRegion | HostRegion:
        """Return a copy of pages; return other arrays as they are."""
        if not isinstance(region, PageRegion):
            return cast("ArrayRegion", region)
        group, names = self._group, self._layout.kv_names
        assert group is not None
        # With no pass in flight, NumPy copies them once; MLX copies three times, at a tenth of the speed.
        if not self._is_pipelined and group.attention.settle(group.pool):
            memory = group.pool.memory()
            if memory is not None:
                return region.copied_to_host(group, names, memory)
        copied = region.copied_out(group, names)
        self._compute([copied])
        return copied

    def misfit(self, regions: Sequence[HostRegion], *, token_count: int) -> str:
        self._thread.check()
        kinds = [region.kind for region in regions]
        if self.facts.needs_checkpoint or RegionKind.CHECKPOINT in kinds:
            return "states that cannot be cut are not accepted from callers"
        if self.facts.has_kv and RegionKind.KV not in kinds:
            return "it has no kv"
        for region in regions:
            expected = [
                (each.name, dtype_name(each.dtype), each.of(token_count))
                for each in self.footprint.token_shapes.get(region.kind, ())
            ]
            if [(each.name, each.dtype, each.shape) for each in region.tensors] != expected:
                return f"its {region.kind} does not fit this model"
        return ""

    def from_host(self, region: HostRegion) -> Region:
        self._thread.check()
        built = from_host(region)
        self._compute([built])
        return built

    def _compute(self, regions: Collection[ArrayRegion]) -> None:
        compute(regions, waits=not self._is_pipelined)


class RegionCopy:
    """Implements the prefix cache's HostCopy. Pages are copied. Other arrays are read in place if they are in
    host memory; on other devices, reading them in place would move them to the host for good.

    Copies of pages are read where the device has put them. Reading such memory runs at 1.7 GB/s on an H200:
    the storage thread may wait for that, the inference thread may not.
    """

    def __init__(
        self, regions: Sequence[Region], copies: Sequence[ArrayRegion | HostRegion], passes: PassClock
    ) -> None:
        """`copies` of these regions, or the regions themselves, are computed or dispatched."""
        self._regions = regions
        """Keeps their pages alive: a page without a reference is reused."""
        self._copies = copies
        self._passes = passes
        self._before = passes.dispatched
        self._is_unified = find_backend().has_unified_memory

    @property
    def is_done(self) -> bool:
        """Whether a pass dispatched after the copies has ended, or none is in flight."""
        ended = self._passes.ended
        return ended > self._before or ended == self._passes.dispatched

    def take(self) -> tuple[HostRegion, ...]:
        views = (each if isinstance(each, HostRegion) else to_host(each) for each in self._copies)
        if self._is_unified:
            return tuple(views)
        return tuple(
            view if is_copy else _copied(view) for view, is_copy in zip(views, self._are_copies, strict=True)
        )

    @property
    def is_apart(self) -> bool:
        return not self._is_unified or all(self._are_copies)

    @property
    def _are_copies(self) -> list[bool]:
        """Which of them are true copies, with no other owner."""
        return [own is not copy for own, copy in zip(self._regions, self._copies, strict=True)]


def _copied(region: HostRegion) -> HostRegion:
    """Return the region in memory of its own."""
    tensors = (dataclasses.replace(each, data=np.array(each.data).data) for each in region.tensors)
    return HostRegion(region.kind, tuple(tensors))


def _dispatch_parts(rebuild: CacheRebuild) -> None:
    """Dispatch parts of about `_RESTORED_BYTES`, at least one, after the device's current work."""
    arrays: list[mx.array] = []
    size_bytes = 0
    while not rebuild.is_done and (not arrays or size_bytes < _RESTORED_BYTES):
        part = rebuild.next_part()
        arrays += part
        size_bytes += sum(array.nbytes for array in part)
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True, slots=True)
class PageRegion:
    """The KV of a block in pages. It begins with the first page, and may end inside the last."""

    pages: tuple[Page, ...]
    token_count: int
    size_bytes: int
    """Of the pages."""
    kind: RegionKind = RegionKind.KV

    @classmethod
    def of(cls, group: PageGroup, pages: Sequence[Page], *, token_count: int) -> PageRegion:
        return cls(tuple(pages), token_count, len(pages) * group.pool.shape.page_bytes)

    def copied_out(self, group: PageGroup, names: Sequence[str]) -> ArrayRegion:
        """Return the region's arrays, lazily. `names` are those of each layer's keys and values, in turn."""
        pool, shape = group.pool, group.pool.shape
        content = group.attention.read_pages(pool, numbers_of(self.pages))
        # [pages, layers, 2, heads, page tokens, size] -> [layers * 2, heads, tokens, size]
        by_layer = content.transpose(1, 2, 3, 0, 4, 5).reshape(
            shape.layer_count * 2, shape.kv_head_count, -1, shape.head_size
        )
        by_layer = by_layer[:, :, : self.token_count]
        arrays = [(name, by_layer[number : number + 1]) for number, name in enumerate(names)]
        return ArrayRegion.of(RegionKind.KV, arrays)

    def copied_to_host(self, group: PageGroup, names: Sequence[str], memory: Bytes) -> HostRegion:
        """Return the same in host memory, copied once by NumPy from `memory`, the pool's."""
        shape = group.pool.shape
        row_bytes = shape.head_size * shape.dtype.size
        head_bytes = shape.page_token_count * row_bytes
        by_page = memory.reshape(-1, shape.layer_count * 2 * shape.kv_head_count, head_bytes)
        by_head = np.empty((by_page.shape[1], self.token_count * row_bytes), np.uint8)
        for index, page in enumerate(self.pages):
            part = by_head[:, index * head_bytes : (index + 1) * head_bytes]
            part[:] = by_page[page.number, :, : part.shape[1]]
        by_layer = by_head.reshape(shape.layer_count * 2, -1)
        like = (1, shape.kv_head_count, self.token_count, shape.head_size)
        tensors = [
            HostTensor(name, dtype_name(shape.dtype), like, content.data)
            for name, content in zip(names, by_layer, strict=True)
        ]
        return HostRegion(RegionKind.KV, tuple(tensors))


class _PoolMemory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of pages. Refers to the pages as long as any view exists: an abandoned read may still write to
    them long after they would have been given to another row."""

    pages: Sequence[Page] = ()


class PageDestination:
    """Implements KvTarget for blocks whose KV goes into pages. Any thread, except for `regions`.

    Files hold a layer's keys and then its values, [1, heads, tokens, size] each, while a page holds those of
    all layers. So one read covers the rows of one head in one page, or more if the next ones follow there.
    """

    def __init__(
        self, group: PageGroup, names: Sequence[str], blocks: Sequence[PlannedBlock], pages: Sequence[Page]
    ) -> None:
        """`pages` are as many as these blocks take, and nobody else has them."""
        pool = group.pool
        own = pool.memory()
        if own is not None and not group.attention.settle(pool):
            own = None
        self._shape = pool.shape
        self._names = names
        self._generation = None if own is None else pool.generation
        """Of the pool that has this memory. A pool that grew or shrank since has other memory."""
        self._numbers = np.arange(len(pages), dtype=np.int32) if own is None else numbers_of(pages)
        """Position of each page in the memory, counted in pages."""
        if own is None:
            own = np.empty(len(pages) * pool.shape.page_bytes, np.uint8)
        self._memory = own.view(_PoolMemory)
        self._memory.pages = pages
        self._spans: dict[int, tuple[slice, int]] = {}
        """A block's slice of the pages and its token count, by its first token."""
        first = 0
        for block in blocks:
            last = first + pool.pages_for(block.header.token_count)
            self._spans[block.header.start_token_index] = slice(first, last), block.header.token_count
            first = last
        assert first == len(pages), (first, len(pages))

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        self._check(tensors, token_count)
        shape = self._shape
        row_bytes = shape.head_size * shape.dtype.size
        head_bytes = shape.page_token_count * row_bytes
        pages = self._numbers[self._spans[start_token_index][0]].astype(np.int64)
        heads = np.arange(shape.layer_count * 2 * shape.kv_head_count)
        begins = (heads[:, None] * head_bytes + pages * shape.page_bytes).ravel()
        ends = begins + head_bytes
        in_last = token_count - (len(pages) - 1) * shape.page_token_count
        ends[len(pages) - 1 :: len(pages)] = begins[len(pages) - 1 :: len(pages)] + in_last * row_bytes
        is_apart = begins[1:] != ends[:-1]
        whole = self._memory.data
        return [
            whole[begin:end]
            for begin, end in zip(
                begins[np.append(True, is_apart)].tolist(),
                ends[np.append(is_apart, True)].tolist(),
                strict=True,
            )
        ]

    def regions(self, group: PageGroup) -> list[PageRegion]:
        """Return the blocks, once all of them are verified. Content read into other memory is copied in: by
        now the pool's memory may have been replaced."""
        pages = self._memory.pages
        if self._generation != group.pool.generation:
            group.attention.fill_pages(group.pool, self._content(), numbers_of(pages))
            mx.async_eval(group.pool.order)  # type: ignore[no-untyped-call]
        return [PageRegion.of(group, pages[span], token_count=count) for span, count in self._spans.values()]

    def _content(self) -> mx.array:
        """Return copies of the pages, [pages, layers, 2, KV heads, page tokens, head size]."""
        shape = self._shape
        by_page = np.asarray(self._memory).reshape(-1, shape.page_bytes)
        content = by_page if self._generation is None else by_page[self._numbers]
        return (
            mx.array(content)
            .view(shape.dtype)
            .reshape(-1, shape.layer_count, 2, shape.kv_head_count, shape.page_token_count, shape.head_size)
        )

    def _check(self, tensors: Sequence[TensorShape], token_count: int) -> None:
        shape = self._shape
        like = (dtype_name(shape.dtype), (1, shape.kv_head_count, token_count, shape.head_size))
        names = [tensor.name for tensor in tensors]
        if names != list(self._names) or any((each.dtype, each.shape) != like for each in tensors):
            stored = sorted({f"{each.dtype}{list(each.shape)}" for each in tensors})
            fit = f"{len(self._names)} of {like[0]}{list(like[1])}"
            raise LayoutMismatch(f"{len(tensors)} kv tensors of {stored}, where pages hold {fit}")


def _put_pages(run: PageRun, blocks: Sequence[PlacedBlock], *, token_count: int) -> None:
    """Put the pages of blocks into a new row's table; nothing is computed.

    Raises StorageError if they do not cover the row's tokens.
    """
    regions = [(block, block.regions.get(RegionKind.KV)) for block in blocks]
    in_pages = [(block, region) for block, region in regions if isinstance(region, PageRegion)]
    check_cover([block for block, _ in in_pages], token_count=token_count)
    for block, region in in_pages:
        if block.start_token_index < token_count:
            run.add(region.pages)
    # The row will write to its last page, so it gets a copy of its own; others keep the page as it is.
    pool = run.group.pool
    count = pool.pages_for(token_count)
    last = run.pages[count - 1]
    assert last is not None
    del run.pages[count - 1 :], run.numbers[count - 1 :]
    if token_count % pool.shape.page_token_count:
        page, [last] = last, pool.take(1)
        run.group.attention.copy_pages(pool, numbers_of([page]), numbers_of([last]))
    run.add([last])
