"""Children of each known block: in the order they came, and by how many tokens they have.

Inference thread only. Nothing here walks over all children of a block: anybody can give a popular
prompt twenty thousand of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.node import Node


class _Siblings(dict[BlockHash, Node]):
    """Two or more blocks below one parent, and how many there are of each token count."""

    __slots__ = ("counts",)

    def __init__(self, first: Node) -> None:
        super().__init__({first.hash: first})
        self.counts = Counter((first.token_count,))


class Children:
    """Blocks by parent. An only child, as most are, takes no more than its place in the dict."""

    def __init__(self) -> None:
        self._of: dict[BlockHash, Node | _Siblings] = {}

    def add(self, node: Node) -> None:
        """Add a block below its parent, as the latest."""
        known = self._of.get(node.parent)
        if known is None:
            self._of[node.parent] = node
            return
        if isinstance(known, Node):
            known = self._of[node.parent] = _Siblings(known)
        known[node.hash] = node
        known.counts[node.token_count] += 1

    def remove(self, node: Node) -> None:
        """Forget a block that was added."""
        known = self._of[node.parent]
        if isinstance(known, _Siblings):
            del known[node.hash]
            known.counts.subtract((node.token_count,))
            if not known.counts[node.token_count]:
                del known.counts[node.token_count]
            if known:
                return
        del self._of[node.parent]

    def latest(self, parent: BlockHash) -> Iterator[Node]:
        """Yield the blocks below `parent`, the last to come first."""
        known = self._of.get(parent)
        if isinstance(known, _Siblings):
            return reversed(known.values())
        return iter(() if known is None else (known,))

    def lengths(self, parent: BlockHash) -> Collection[int]:
        """Return the token counts that blocks below `parent` have, each once."""
        known = self._of.get(parent)
        if isinstance(known, _Siblings):
            return known.counts.keys()
        return () if known is None else (known.token_count,)
