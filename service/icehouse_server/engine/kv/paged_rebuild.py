"""Paged rebuild of a row: the pages of its blocks are put into its table.

KV on SSD is read into pages first, where the host can write to them; elsewhere into host memory, and copied
from there at once. So a block that was read is a block in RAM, and nothing is copied to begin with it. In
files and in host memory each layer has its keys and its values by themselves, [1, heads, tokens, size], like
the region of any other model (`kv_cache.regions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv.page_table import PageGroup, PageRun
from icehouse_server.engine.kv.paged_cache import table_of
from icehouse_server.engine.kv.pool import Page, numbers_of
from icehouse_server.engine.kv_cache.cache_classes import Cache, CachePart
from icehouse_server.engine.kv_cache.rebuild import CacheRebuild, check_cover
from icehouse_server.engine.kv_cache.regions import ArrayRegion, dtype_name
from icehouse_server.engine.prefix_cache.tiers.runner_port import PlacedBlock
from icehouse_server.storage.api import PlannedBlock, TensorShape, UnfitLayout


@dataclasses.dataclass(frozen=True, slots=True)
class PageRegion:
    """The KV of a block in pages: it begins with the first one, and may end inside the last one."""

    pages: tuple[Page, ...]
    token_count: int
    size_bytes: int
    """Of the pages."""
    kind: RegionKind = RegionKind.KV

    @classmethod
    def of(cls, group: PageGroup, pages: Sequence[Page], *, token_count: int) -> PageRegion:
        """Return a region of these pages."""
        return cls(tuple(pages), token_count, len(pages) * group.pool.shape.page_bytes)

    def copied_out(self, group: PageGroup, names: Sequence[str]) -> ArrayRegion:
        """Return the region's arrays, lazily, by the names of the layers' keys and values in turn."""
        pool, shape = group.pool, group.pool.shape
        content = group.attention.read_pages(pool, numbers_of(self.pages))
        # [pages, layers, 2, heads, page tokens, size] -> [layers * 2, heads, tokens, size]
        by_layer = content.transpose(1, 2, 3, 0, 4, 5).reshape(
            shape.layer_count * 2, shape.kv_head_count, -1, shape.head_size
        )
        by_layer = by_layer[:, :, : self.token_count]
        arrays = [(name, by_layer[number : number + 1]) for number, name in enumerate(names)]
        return ArrayRegion.of(RegionKind.KV, arrays)


class _PageMemory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of pages. It refers to the pages for as long as anybody has a view: the system may return from an
    abandoned read long after the page would have been another row's."""

    pages: Sequence[Page] = ()


class PageDestination:
    """Implements KvPlace for blocks whose KV is to be in pages. Any thread, except for `regions`.

    Files have a layer's keys and then its values, [1, heads, tokens, size] each; a page has those of all
    layers. So one read covers the rows of one head in one page, and more where the next ones follow it there.
    """

    def __init__(
        self, group: PageGroup, names: Sequence[str], blocks: Sequence[PlannedBlock], pages: Sequence[Page]
    ) -> None:
        """`pages` are as many as these blocks take, and nobody else's."""
        pool = group.pool
        own = pool.memory()
        if own is not None and not group.attention.settle(pool):
            own = None
        self._shape = pool.shape
        self._names = names
        self._page_count = None if own is None else pool.page_count
        """Of the pool whose memory this is: a pool that has grown since has other memory."""
        self._numbers = np.arange(len(pages), dtype=np.int32) if own is None else numbers_of(pages)
        """Where each page lies in the memory, counted in pages."""
        if own is None:
            own = np.empty(len(pages) * pool.shape.page_bytes, np.uint8)
        self._memory = own.view(_PageMemory)
        self._memory.pages = pages
        self._spans: dict[int, tuple[slice, int]] = {}
        """Which of the pages a block has, and its token count, by its first token."""
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
        """Return the blocks, once all of them are verified. What was read to other memory is copied: the pool
        may have grown meanwhile."""
        pages = self._memory.pages
        if self._page_count != group.pool.page_count:
            group.attention.fill_pages(group.pool, self._content(), numbers_of(pages))
            mx.async_eval(group.pool.order)  # type: ignore[no-untyped-call]
        return [PageRegion.of(group, pages[span], token_count=count) for span, count in self._spans.values()]

    def _content(self) -> mx.array:
        """Return copies of the pages, [pages, layers, 2, KV heads, page tokens, head size]."""
        shape = self._shape
        by_page = np.asarray(self._memory).reshape(-1, shape.page_bytes)
        content = by_page if self._page_count is None else by_page[self._numbers]
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
            raise UnfitLayout(f"{len(tensors)} kv tensors of {stored}, where pages hold {fit}")


class PagedRebuild(CacheRebuild):
    """A rebuild of a row whose KV of unlimited context, if any, is in pages."""

    def __init__(
        self,
        parts: Sequence[CachePart],
        caches: list[Cache],
        blocks: Sequence[PlacedBlock],
        *,
        token_count: int,
    ) -> None:
        others = [part for part in parts if part.kind is not RegionKind.KV]
        super().__init__(others, caches, blocks, token_count=token_count)
        self._run = next((run for run in table_of(caches).runs if run.group.window is None), None)
        """The pages of the layers of unlimited context, until they are there."""
        if self._run is not None:
            in_pages = [b for b in blocks if isinstance(b.regions.get(RegionKind.KV), PageRegion)]
            check_cover(in_pages, token_count=token_count)

    @property
    def is_done(self) -> bool:
        return self._run is None and super().is_done

    def next_part(self) -> list[mx.array]:
        """Put all pages into the table first; nothing has to be computed for them. Then as for any row."""
        if self._run is None:
            return super().next_part()
        self._put_pages(self._run)
        self._run = None
        return []

    def _put_pages(self, run: PageRun) -> None:
        for block in self._blocks:
            region = block.regions.get(RegionKind.KV)
            if block.start_token_index < self.token_count and isinstance(region, PageRegion):
                run.add(region.pages)
        # The row will write to its last page, so it gets one of its own: others see the page as it is.
        pool = run.group.pool
        count = pool.pages_for(self.token_count)
        last = run.pages[count - 1]
        assert last is not None
        del run.pages[count - 1 :], run.numbers[count - 1 :]
        if self.token_count % pool.shape.page_token_count:
            page, [last] = last, pool.take(1)
            run.group.attention.copy_pages(pool, numbers_of([page]), numbers_of([last]))
        run.add([last])
