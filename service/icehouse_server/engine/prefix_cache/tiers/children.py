"""Children of each known block: in the order they came, and by how many tokens they have.

Inference thread only. Nothing here walks over all children of a block: anybody can give a popular
prompt twenty thousand of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.entry import Entry


class _Siblings:
    """Two or more blocks below one parent."""

    __slots__ = ("counts", "entries")

    def __init__(self) -> None:
        self.entries: dict[BlockHash, Entry] = {}
        self.counts: dict[int, int] = {}
        """How many there are of each token count."""

    def add(self, entry: Entry) -> None:
        self.entries[entry.hash] = entry
        self.counts[entry.token_count] = self.counts.get(entry.token_count, 0) + 1

    def remove(self, entry: Entry) -> None:
        del self.entries[entry.hash]
        self.counts[entry.token_count] -= 1
        if not self.counts[entry.token_count]:
            del self.counts[entry.token_count]


class Children:
    """Blocks by parent. An only child, as most are, takes no more than its place in the dict."""

    def __init__(self) -> None:
        self._of: dict[BlockHash, Entry | _Siblings] = {}

    def add(self, entry: Entry) -> None:
        """Add a block below its parent, as the latest."""
        known = self._of.get(entry.parent)
        if known is None:
            self._of[entry.parent] = entry
            return
        if isinstance(known, Entry):
            siblings = _Siblings()
            siblings.add(known)
            known = self._of[entry.parent] = siblings
        known.add(entry)

    def remove(self, entry: Entry) -> None:
        """Forget a block that was added."""
        known = self._of[entry.parent]
        if isinstance(known, _Siblings):
            known.remove(entry)
            if known.entries:
                return
        del self._of[entry.parent]

    def latest(self, parent: BlockHash) -> Iterator[Entry]:
        """Yield the blocks below `parent`, the last to come first."""
        known = self._of.get(parent)
        if isinstance(known, _Siblings):
            yield from reversed(known.entries.values())
        elif known is not None:
            yield known

    def lengths(self, parent: BlockHash) -> Collection[int]:
        """Return the token counts that blocks below `parent` have, each once."""
        known = self._of.get(parent)
        if isinstance(known, _Siblings):
            return known.counts.keys()
        return () if known is None else (known.token_count,)

    def of(self, parent: BlockHash, *, limit: int | None = None) -> tuple[Entry, ...]:
        """Return the blocks below `parent`, the last `limit` of them, oldest first."""
        return tuple(islice(self.latest(parent), limit))[::-1]
