"""Restore of a row whose KV lies in pages: blocks in RAM are put into its table, and what was read from SSD
is written into pages of its own. Nothing is waited for. Inference thread only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.kv.page_region import PageRegion
from icehouse_server.engine.kv.paging import Paging, table_of
from icehouse_server.engine.kv.pool import numbers_of
from icehouse_server.engine.kv_cache.cache_classes import Part
from icehouse_server.engine.kv_cache.restore import LoadedKv, RestoreSource, Restoring
from icehouse_server.errors import Reason, StorageError


@dataclasses.dataclass(frozen=True, slots=True)
class PageCutting:
    """Tokens [start, stop) of one sequence, whose pages a block is to have."""

    start: int
    stop: int


class PagedRestoring:
    """A restore under way. `caches` is complete once `step` has returned False."""

    def __init__(
        self,
        paging: Paging,
        parts: Sequence[Part],
        caches: list[Any],
        source: RestoreSource,
        *,
        token_count: int,
    ) -> None:
        """`caches`: a new row's. Raises StorageError when the blocks do not cover the tokens."""
        self._paging = paging
        self._source = source
        self.token_count = token_count
        others = [part for part in parts if part.kind is not RegionKind.KV]
        self._others = Restoring(
            others, caches, source, token_count=token_count, capacity_token_count=token_count
        )
        self._table = table_of(caches)
        self._covered_count = 0
        """Tokens from 0 on that the table's pages hold."""

    @property
    def caches(self) -> list[Any]:
        return self._others.caches

    def step(self) -> bool:
        """Rebuild the next part; tell whether more are left. Raises StorageError."""
        if not self._table.pages:
            self._put_pages()
        return self._others.step()

    def _put_pages(self) -> None:
        loaded = self._source.loaded_kv
        for block in self._source.blocks:
            if block.kv is not None and self._covered_count < self.token_count:
                self._check_next(block.start_token_index)
                region = cast("PageRegion", block.kv)
                self._table.add(region.pages)
                self._covered_count += region.token_count
        if loaded is not None and self._covered_count < self.token_count:
            self._check_next(loaded.start_token_index)
            self._write(loaded)
        if self._covered_count < self.token_count:
            raise _unusable(f"kv ends at token {self._covered_count} of {self.token_count}")
        self._own_last_page()

    def _check_next(self, start: int) -> None:
        if start != self._covered_count:
            raise _unusable(f"kv starts at token {start} where {self._covered_count} is next")

    def _own_last_page(self) -> None:
        """Have the page to itself that the row will write to: others see it as it is."""
        pool, table = self._paging.pool, self._table
        count = pool.pages_for(self.token_count)
        last = table.pages[count - 1]
        del table.pages[count - 1 :], table.numbers[count - 1 :]
        if self.token_count % pool.shape.page_token_count:
            copy = pool.take(1)
            self._paging.attention.copy_pages(pool, numbers_of([last]), numbers_of(copy))
            table.add(copy)
        else:
            table.add([last])

    def _write(self, loaded: LoadedKv) -> None:
        """Write what was read from SSD into pages of the row's own."""
        start = loaded.start_token_index
        stop = min(loaded.end_token_index, self.token_count)
        table = self._table
        table.make_room(stop)
        before, table.token_count = table.token_count, start
        places = self._paging.places([table], [stop - start])
        table.token_count = before
        first, last = start - loaded.first_token_index, stop - loaded.first_token_index
        for place, layer in self._paging.layers.items():
            keys, values = (
                loaded.target.take(f"{place:03d}.{suffix}", token_count=last)[:, :, first:last].swapaxes(0, 2)
                for suffix in ("k", "v")
            )
            self._paging.attention.write(self._paging.pool, keys, values, places, layer=layer)

        self._covered_count = stop


def _unusable(message: str) -> StorageError:
    return StorageError(Reason.STORE_UNUSABLE, f"The cached prefix is not usable: {message}")
