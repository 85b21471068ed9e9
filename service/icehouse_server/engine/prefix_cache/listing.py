"""Block listing: every known block into the block log, a slice at a time.

Inference thread only. Who listens asks for the next slice when it has taken the last one, so that a step pays
for one slice at most, and a listing never fills the log by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from icehouse_server.domain.cache_commands import Listing
from icehouse_server.domain.ids import CacheScope, Tenant
from icehouse_server.engine.core.block_log import KvTier, ListingEnded
from icehouse_server.engine.prefix_cache.cache import PrefixCache
from icehouse_server.engine.prefix_cache.tiers.entry import Entry

SLICE_COUNT = 256
"""Blocks told at once; what they make of changes has room in the log."""


class BlockListing:
    """At most one is under way; one that begins takes the place of the one before."""

    def __init__(self, cache: PrefixCache, *, slice_count: int = SLICE_COUNT) -> None:
        self._cache = cache
        self.slice_count = slice_count
        self._left: list[Entry] = []
        self._is_under_way = False

    def begin(self, tenants: Iterable[Tenant]) -> Listing:
        """Turn the log on and tell the first slice; the roots of these tenants are known from now on."""
        for tenant in tenants:
            self._cache.root(CacheScope(tenant))
        self._left, self._is_under_way = self._cache.blocks(), True
        self._cache.log.begin()
        return self.proceed()

    def proceed(self) -> Listing:
        """Tell the next slice: as the blocks are now, since what changed since the beginning was told."""
        log = self._cache.log
        if not log.is_on:
            self._left, self._is_under_way = [], False
        for _ in range(min(self.slice_count, len(self._left))):
            entry = self._left.pop()
            if self._cache.find(entry.hash) is entry:
                for tier in _tiers(entry):
                    log.note(entry.came_to(tier))
        if self._is_under_way and not self._left:
            self._is_under_way = False
            log.note(ListingEnded())
        return Listing(len(self._left))


def _tiers(entry: Entry) -> Iterator[KvTier]:
    if entry.ram:
        yield KvTier.RAM
    if entry.ssd:
        yield KvTier.SSD
