"""Paging of one model: which of a row's caches lie in page pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from icehouse_server.engine.kv.paged_cache import PagedCache, PagedWindowCache
from icehouse_server.engine.kv.table import PageGroup, PageTable
from icehouse_server.engine.kv_cache.cache_classes import Cache


@dataclasses.dataclass(frozen=True, slots=True)
class Paging:
    """The groups of a model's layers whose KV is in pages."""

    groups: tuple[PageGroup, ...]
    is_bounded: bool = False
    """Whether the pools are all that KV may take."""

    def caches(self, fresh: Sequence[Cache]) -> list[Cache]:
        """Return a new row's caches: these, and paged ones with one new table where KV is in pages."""
        table = PageTable(self.groups)
        caches = list(fresh)
        for run in table.runs:
            kind = PagedCache if run.group.window is None else PagedWindowCache
            for place, layer in run.group.layers.items():
                caches[place] = kind(table, run, layer)
        return caches

    @property
    def unlimited(self) -> PageGroup | None:
        """The layers of unlimited context."""
        return next((group for group in self.groups if group.window is None), None)

    @property
    def bounded_bytes(self) -> int:
        """Of pools that were made at once; 0 where they grow."""
        return self.size_bytes if self.is_bounded else 0

    @property
    def size_bytes(self) -> int:
        """Of all pages."""
        return sum(group.pool.page_count * group.pool.shape.page_bytes for group in self.groups)

    @property
    def free_bytes(self) -> int:
        """Of pages that nobody has."""
        return sum(group.pool.free_bytes for group in self.groups)


def table_of(caches: Sequence[Cache]) -> PageTable:
    """Return the page table of a row's caches; one that only counts where none of them is paged."""
    return next((cache.table for cache in caches if isinstance(cache, PagedCache)), PageTable())
