"""Stored order: each owner's blocks on SSD, least recently used first, tails before heads.

Inference thread only. Heaps with stale entries: a use is noted in the entry alone, and set right when it
comes to the top. So an eviction costs what it takes, not a look at every block.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from itertools import count

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry

_Owner = BlockHash | None
_Item = tuple[float, int, int, Entry]


class StoredOrder:
    """Which blocks go first where an owner's part of the SSD is full. Pinned ones are left out."""

    def __init__(self) -> None:
        self._heaps: dict[_Owner, list[_Item]] = {}
        self._numbers = count()

    def add(self, entry: Entry) -> None:
        """Note a block that came to SSD, changed hands or is pinned no longer."""
        self._push(self._heaps.setdefault(entry.owner, []), entry)

    def victims(
        self, owners: Iterable[_Owner], *, needed_bytes: float, kept: Collection[BlockHash]
    ) -> list[Entry]:
        """Return blocks of these owners, in the order they go, of so many bytes or all that may go."""
        heaps = [(owner, heap) for owner in owners if (heap := self._heaps.get(owner))]
        chosen: dict[BlockHash, Entry] = {}
        passed: list[Entry] = []
        freed_bytes = 0
        while freed_bytes < needed_bytes:
            tops = [(self._settle(heap, owner)[:3], heap) for owner, heap in heaps if heap]
            tops = [(key, heap) for key, heap in tops if heap]
            if not tops:
                break
            heap = min(tops, key=lambda top: top[0])[1]
            entry = heapq.heappop(heap)[3]
            if entry.hash in chosen:
                continue
            if entry.hash in kept:
                passed.append(entry)
                continue
            chosen[entry.hash] = entry
            freed_bytes += entry.ssd_bytes
        # The caller may think better of it; one that goes is found to be gone later.
        for entry in (*passed, *chosen.values()):
            self.add(entry)
        for owner, heap in heaps:
            if not heap:
                self._heaps.pop(owner, None)
        return list(chosen.values())

    def _settle(self, heap: list[_Item], owner: _Owner) -> _Item:
        """Bring what is really first to the top; an item of no meaning when nothing is left."""
        while heap:
            used_time, _, _, entry = heap[0]
            if not entry.ssd or entry.is_pinned or entry.owner != owner:
                heapq.heappop(heap)
            elif entry.last_used_time != used_time:
                heapq.heapreplace(heap, self._item(entry))
            else:
                return heap[0]
        return (0.0, 0, 0, _NOBODY)

    def _push(self, heap: list[_Item], entry: Entry) -> None:
        heapq.heappush(heap, self._item(entry))

    def _item(self, entry: Entry) -> _Item:
        return (entry.last_used_time, -entry.start_token_index, next(self._numbers), entry)


_NOBODY = Entry(BlockHash(b""), BlockHash(b""), 0, 0)
