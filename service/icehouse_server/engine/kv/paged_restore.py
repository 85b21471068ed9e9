"""Restore of a row whose KV lies in pages: blocks in RAM are put into its table, and what was read from SSD
is written into pages of its own. Nothing is waited for. Inference thread only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv.page_region import PageRegion
from icehouse_server.engine.kv.paging import table_of
from icehouse_server.engine.kv.places import places_of_one
from icehouse_server.engine.kv.pool import Page, numbers_of
from icehouse_server.engine.kv.table import PageRun
from icehouse_server.engine.kv_cache.cache_classes import Part
from icehouse_server.engine.kv_cache.restore import LoadedKv, RestoreSource, Restoring
from icehouse_server.errors import Reason, StorageError


@dataclasses.dataclass(frozen=True, slots=True)
class PageCutting:
    """Tokens [start, stop) of one sequence, whose pages a block is to have."""

    start: int
    stop: int


class PagedRestoring:
    """A restore under way. `caches` is complete once `step`, or `dispatch`, has returned False."""

    def __init__(
        self,
        parts: Sequence[Part],
        caches: list[Any],
        source: RestoreSource,
        *,
        token_count: int,
    ) -> None:
        """`caches`: a new row's. Raises StorageError when the blocks do not cover the tokens."""
        self._source = source
        self.token_count = token_count
        others = [part for part in parts if part.kind is not RegionKind.KV]
        self._others = Restoring(
            others, caches, source, token_count=token_count, capacity_token_count=token_count
        )
        self._run = next((run for run in table_of(caches).runs if run.group.window is None), None)
        """The pages of the layers of unlimited context."""
        self._covered_count = 0
        """Tokens from 0 on that the table's pages hold."""

    @property
    def caches(self) -> list[Any]:
        return self._others.caches

    def step(self) -> bool:
        """Rebuild the next part; tell whether more are left. Raises StorageError."""
        if self._run is not None and not self._run.pages:
            self._put_pages(self._run)
        return self._others.step()

    def dispatch(self, *, limit_bytes: int) -> bool:
        """Do so for about so many bytes of what is not in pages, and wait for nothing."""
        if self._run is not None and not self._run.pages:
            self._put_pages(self._run)
        return self._others.dispatch(limit_bytes=limit_bytes)

    def _put_pages(self, run: PageRun) -> None:
        loaded = self._source.loaded_kv
        for block in self._source.blocks:
            if block.kv is not None and self._covered_count < self.token_count:
                self._check_next(block.start_token_index)
                region = cast("PageRegion", block.kv)
                run.add(region.pages)
                self._covered_count += region.token_count
        if loaded is not None and self._covered_count < self.token_count:
            self._check_next(loaded.start_token_index)
            self._write(run, loaded)
        if self._covered_count < self.token_count:
            raise _unusable(f"kv ends at token {self._covered_count} of {self.token_count}")
        self._own_last_page(run)

    def _check_next(self, start: int) -> None:
        if start != self._covered_count:
            raise _unusable(f"kv starts at token {start} where {self._covered_count} is next")

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

    def _write(self, run: PageRun, loaded: LoadedKv) -> None:
        """Write what was read from SSD into pages of the row's own."""
        start = loaded.start_token_index
        stop = min(loaded.end_token_index, self.token_count)
        run.make_room(stop)
        places = places_of_one(run, start=start, stop=stop)
        first, last = start - loaded.first_token_index, stop - loaded.first_token_index
        for place, layer in run.group.layers.items():
            keys, values = (
                loaded.target.take(f"{place:03d}.{suffix}", token_count=last)[:, :, first:last].swapaxes(0, 2)
                for suffix in ("k", "v")
            )
            run.group.attention.write(run.group.pool, keys, values, places, layer=layer)

        self._covered_count = stop


def _copy(run: PageRun, page: Page) -> Page:
    pool = run.group.pool
    [copy] = pool.take(1)
    run.group.attention.copy_pages(pool, numbers_of([page]), numbers_of([copy]))
    return copy


def _unusable(message: str) -> StorageError:
    return StorageError(Reason.STORE_UNUSABLE, f"The cached prefix is not usable: {message}")
