"""Stored order: each owner's blocks on SSD, least recently used first, tails before heads.

Inference thread only. Heaps with stale items: a use is noted in the entry alone, and set right when it
comes to the top. So an eviction costs what it takes, not a look at every block. What is gone or pinned
leaves an item behind too; a heap that is mostly of such items is made anew, so it keeps few that are gone.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Iterable
from itertools import count

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry

_Owner = BlockHash | None
_Item = tuple[float, int, int, Entry]

_STALE_LIMIT = 64
"""Stale items that are not worth making a heap anew for."""


@dataclasses.dataclass(slots=True)
class _Heap:
    """One owner's items."""

    items: list[_Item] = dataclasses.field(default_factory=list)
    block_count: int = 0
    """Blocks added and not removed since: each has an item or more, and every other item is stale."""


class StoredOrder:
    """Which blocks go first where an owner's part of the SSD is full. Pinned ones are left out."""

    def __init__(self) -> None:
        self._heaps: dict[_Owner, _Heap] = {}
        self._numbers = count()

    def add(self, entry: Entry) -> None:
        """Note a block that came to SSD, came to this owner or is pinned no longer."""
        heap = self._heaps.setdefault(entry.owner, _Heap())
        heap.block_count += 1
        self._push(heap, entry)
        self._compact(heap, entry.owner)

    def remove(self, entry: Entry) -> None:
        """Note a block that was added, and leaves SSD, leaves this owner or is pinned."""
        heap = self._heaps[entry.owner]
        heap.block_count -= 1
        if heap.block_count:
            self._compact(heap, entry.owner, without=entry)
        else:
            del self._heaps[entry.owner]

    def victims(
        self, owners: Iterable[_Owner], *, needed_bytes: float, kept: Collection[BlockHash]
    ) -> list[Entry]:
        """Return blocks of these owners, in the order they go, of so many bytes or all that may go."""
        heaps = [(owner, heap.items) for owner in owners if (heap := self._heaps.get(owner))]
        chosen: dict[BlockHash, Entry] = {}
        passed: list[Entry] = []
        freed_bytes = 0
        while freed_bytes < needed_bytes:
            tops = [(self._settle(items, owner)[:3], items) for owner, items in heaps if items]
            tops = [(key, items) for key, items in tops if items]
            if not tops:
                break
            items = min(tops, key=lambda top: top[0])[1]
            entry = heapq.heappop(items)[3]
            if entry.hash in chosen:
                continue
            if entry.hash in kept:
                passed.append(entry)
                continue
            chosen[entry.hash] = entry
            freed_bytes += entry.ssd_bytes
        # The caller may think better of it; one that goes is removed later.
        for entry in (*passed, *chosen.values()):
            self._push(self._heaps[entry.owner], entry)
        return list(chosen.values())

    def _settle(self, items: list[_Item], owner: _Owner) -> _Item:
        """Bring what is really first to the top; an item of no meaning when nothing is left."""
        while items:
            used_time, _, _, entry = items[0]
            if not _may_go(entry, owner):
                heapq.heappop(items)
            elif entry.last_used_time != used_time:
                heapq.heapreplace(items, self._item(entry))
            else:
                return items[0]
        return (0.0, 0, 0, _NOBODY)

    def _compact(self, heap: _Heap, owner: _Owner, *, without: Entry | None = None) -> None:
        """Make a heap anew that is mostly of stale items: each of them keeps a block that may be gone."""
        if len(heap.items) > 2 * heap.block_count + _STALE_LIMIT:
            entries = {item[3] for item in heap.items if item[3] is not without}
            heap.items = [self._item(entry) for entry in entries if _may_go(entry, owner)]
            heapq.heapify(heap.items)

    def _push(self, heap: _Heap, entry: Entry) -> None:
        heapq.heappush(heap.items, self._item(entry))

    def _item(self, entry: Entry) -> _Item:
        return (entry.last_used_time, -entry.start_token_index, next(self._numbers), entry)


def _may_go(entry: Entry, owner: _Owner) -> bool:
    return entry.ssd_bytes > 0 and not entry.is_pinned and entry.owner == owner


_NOBODY = Entry(BlockHash(b""), BlockHash(b""), 0, 0)
