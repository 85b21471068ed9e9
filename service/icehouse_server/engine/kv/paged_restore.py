"""Restore of a row whose KV lies in pages: the pages of its blocks are put into its table.

What SSD has of them is read into pages first, where the host can write there; elsewhere into memory of the
host, and all at once from there. So a block that was read is a block in RAM, and nothing is copied for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.attention.port import PoolShape
from icehouse_server.engine.kv.page_region import PageRegion, page_region
from icehouse_server.engine.kv.paging import table_of
from icehouse_server.engine.kv.pool import Page, numbers_of
from icehouse_server.engine.kv.table import PageGroup, PageRun
from icehouse_server.engine.kv_cache.cache_classes import Part
from icehouse_server.engine.kv_cache.regions import dtype_name
from icehouse_server.engine.kv_cache.restore import Restoring
from icehouse_server.engine.prefix_cache.tiers.ports import PlacedBlock
from icehouse_server.errors import Reason, StorageError
from icehouse_server.storage.api import LayoutMismatch, PlannedBlock, TensorShape


class _Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of pages. These belong to it as long as anybody has a view: the system may return from a read
    that nobody waits for any more long after the page was to be another row's."""

    pages: Sequence[Page] = ()


class PagePlace:
    """Implements KvTarget for blocks whose KV is to be in pages. Any thread, but for `regions`.

    Files have a layer's keys and then its values, [1, heads, tokens, size] each; a page has those of all
    layers. So the rows of one head in one page are read at once, and more where the next ones follow there.
    """

    def __init__(
        self, group: PageGroup, names: Sequence[str], blocks: Sequence[PlannedBlock], pages: Sequence[Page]
    ) -> None:
        """`pages` are as many as these blocks take, and nobody else's."""
        pool = group.pool
        own = pool.memory()
        if own is not None and not group.attention.settle(pool):
            own = None
        self._shape: PoolShape = pool.shape
        self._names = names
        self._page_count = None if own is None else pool.page_count
        """Of the pool whose memory this is: one that grew since has another."""
        self._numbers = np.arange(len(pages), dtype=np.int32) if own is None else numbers_of(pages)
        """Where each page lies in the memory, counted in pages."""
        if own is None:
            own = np.empty(len(pages) * pool.shape.page_bytes, np.uint8)
        self._memory = own.view(_Memory)
        self._memory.pages = pages
        self._spans: dict[int, slice] = {}
        """Which of the pages a block has, by its first token."""
        self._token_counts = [block.header.token_count for block in blocks]
        first = 0
        for block in blocks:
            last = first + pool.pages_for(block.header.token_count)
            self._spans[block.header.start_token_index] = slice(first, last)
            first = last
        assert first == len(pages), (first, len(pages))

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        self._check(tensors, token_count)
        shape = self._shape
        row_bytes = shape.head_size * shape.dtype.size
        head_bytes = shape.page_token_count * row_bytes
        pages = self._numbers[self._spans[start_token_index]].astype(np.int64)
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
        """Return the blocks, all of which are right by now. What was read to other memory is copied: the pool
        may have grown meanwhile."""
        pages = self._memory.pages
        if self._page_count != group.pool.page_count:
            group.attention.fill_pages(group.pool, self._content(), numbers_of(pages))
            mx.async_eval(group.pool.order)  # type: ignore[no-untyped-call]
        return [
            page_region(group, pages[span], token_count=count)
            for span, count in zip(self._spans.values(), self._token_counts, strict=True)
        ]

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
            told = sorted({f"{each.dtype}{list(each.shape)}" for each in tensors})
            fit = f"{len(self._names)} of {like[0]}{list(like[1])}"
            raise LayoutMismatch(f"{len(tensors)} kv tensors of {told}, where pages hold {fit}")


class PagedRestoring:
    """A restore under way. `caches` is complete once `step`, or `dispatch`, has returned False."""

    def __init__(
        self, parts: Sequence[Part], caches: list[Any], blocks: Sequence[PlacedBlock], *, token_count: int
    ) -> None:
        """`caches`: a new row's."""
        self._blocks = blocks
        self.token_count = token_count
        others = [part for part in parts if part.kind is not RegionKind.KV]
        self._others = Restoring(others, caches, blocks, token_count=token_count)
        self._run = next((run for run in table_of(caches).runs if run.group.window is None), None)
        """The pages of the layers of unlimited context."""

    @property
    def caches(self) -> list[Any]:
        return self._others.caches

    def step(self) -> bool:
        """Rebuild the next part; tell whether more are left. Raises StorageError."""
        self._put_pages()
        return self._others.step()

    def dispatch(self, *, limit_bytes: int) -> bool:
        """Do so for about so many bytes of what is not in pages, and wait for nothing."""
        self._put_pages()
        return self._others.dispatch(limit_bytes=limit_bytes)

    def _put_pages(self) -> None:
        run = self._run
        if run is None or run.pages:
            return
        covered = 0
        for block in self._blocks:
            if covered >= self.token_count:
                break
            region = cast("PageRegion | None", block.regions.get(RegionKind.KV))
            if region is None or block.start_token_index != covered:
                raise _unusable(f"kv starts at token {block.start_token_index} where {covered} is next")
            run.add(region.pages)
            covered += region.token_count
        if covered < self.token_count:
            raise _unusable(f"kv ends at token {covered} of {self.token_count}")
        self._own_last_page(run)

    def _own_last_page(self, run: PageRun) -> None:
        """Have the page to itself that the row will write to: others see it as it is."""
        pool = run.group.pool
        count = pool.pages_for(self.token_count)
        last = run.pages[count - 1]
        assert last is not None
        del run.pages[count - 1 :], run.numbers[count - 1 :]
        if self.token_count % pool.shape.page_token_count:
            last = _copy(run, last)
        run.add([last])


def _copy(run: PageRun, page: Page) -> Page:
    pool = run.group.pool
    [copy] = pool.take(1)
    run.group.attention.copy_pages(pool, numbers_of([page]), numbers_of([copy]))
    return copy


def _unusable(message: str) -> StorageError:
    return StorageError(Reason.STORE_UNUSABLE, f"The cached prefix is not usable: {message}")
