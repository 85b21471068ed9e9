"""Account of one tier: the bytes of its blocks by owner, and the order of eviction.

Inference thread only.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
from collections.abc import Callable, Collection, Iterator
from itertools import count
from operator import itemgetter

from icehouse_server.domain.ids import BlockHash
from icehouse_server.engine.prefix_cache.tiers.node import Node

Owner = BlockHash | None
_Order = collections.OrderedDict[Node, int]


class TierAccount:
    """The tree maintains it: it removes a node before a change that counts here, and adds it afterwards.

    A chain is touched from its end to its beginning, so that its end is evicted before its beginning without
    a visit to the tree. Pinned blocks are in no order, so that the search for victims need not skip them.
    """

    def __init__(
        self, size_of: Callable[[Node], int], *, block_token_count: int, has_order: bool, by_owner: bool
    ) -> None:
        """`has_order` allows searches for victims of all owners, `by_owner` of given owners."""
        self._size_of = size_of
        self._block_token_count = block_token_count
        self._order: _Order | None = collections.OrderedDict() if has_order else None
        """Nodes, least recently used first, each with a number that grows with the time of use."""
        self._orders: dict[Owner, _Order] | None = {} if by_owner else None
        """The same by owner."""
        self._numbers = count(1)
        self.used_bytes = 0
        self.block_count = 0
        self.tail_count = 0
        self.token_count = 0
        self.used_by: collections.Counter[Owner] = collections.Counter()
        """Bytes by the root that owns them."""
        self.pinned_by: collections.Counter[Owner] = collections.Counter()
        """Of these, the bytes of pinned blocks."""

    def add(self, node: Node, *, is_oldest: bool = False) -> None:
        """Count a node; it is the most recently used one, or with `is_oldest` the least."""
        self._count(node, 1)
        if node.is_pinned:
            return
        if self._orders is not None and node.owner not in self._orders:
            self._orders[node.owner] = collections.OrderedDict()
        number = next(self._numbers)
        for order in self._orders_of(node):
            order[node] = -number if is_oldest else number
            if is_oldest:
                order.move_to_end(node, last=False)

    def remove(self, node: Node) -> None:
        self._count(node, -1)
        for order in self._orders_of(node):
            order.pop(node, None)
            if not order and self._orders is not None and order is not self._order:
                del self._orders[node.owner]

    def touch(self, node: Node) -> None:
        """Record the use of a node; does nothing if it is in no order."""
        for order in self._orders_of(node):
            if node in order:
                order[node] = next(self._numbers)
                order.move_to_end(node)

    def demote(self, node: Node) -> None:
        """Make a node the least recently used one; does nothing if it is in no order."""
        for order in self._orders_of(node):
            if node in order:
                order[node] = -next(self._numbers)
                order.move_to_end(node, last=False)

    @contextlib.contextmanager
    def resized(self, node: Node) -> Iterator[None]:
        """Update the counts for a node whose size changes meanwhile; it keeps its place in the order."""
        self._count(node, -1)
        yield
        self._count(node, 1)

    def victims(
        self, needed_bytes: float, *, may_go: Callable[[Node], bool], owners: Collection[Owner] | None = None
    ) -> list[Node] | None:
        """Return victims, of these owners or of all, that free so many bytes; None if there are too few."""
        chosen = []
        for node in self.oldest(owners):
            if needed_bytes <= 0:
                break
            if may_go(node):
                chosen.append(node)
                needed_bytes -= self._size_of(node)
        return chosen if needed_bytes <= 0 else None

    def oldest(self, owners: Collection[Owner] | None = None) -> Iterator[Node]:
        """Yield the evictable nodes of these owners or of all, least recently used first."""
        if owners is None:
            return iter(self._order or ())
        orders = [self._orders[owner].items() for owner in owners if self._orders and owner in self._orders]
        return (node for node, _ in heapq.merge(*orders, key=itemgetter(1)))

    def latest(self) -> Iterator[Node]:
        """Yield the evictable nodes, most recently used first."""
        return reversed(self._order or {})

    def _orders_of(self, node: Node) -> list[_Order]:
        own = None if self._orders is None else self._orders.get(node.owner)
        return [order for order in (self._order, own) if order is not None]

    def _count(self, node: Node, sign: int) -> None:
        size_bytes = sign * self._size_of(node)
        self.used_bytes += size_bytes
        self.block_count += sign
        self.tail_count += sign * (node.token_count < self._block_token_count)
        self.token_count += sign * node.token_count
        for account in (self.used_by, self.pinned_by) if node.is_pinned else (self.used_by,):
            account[node.owner] += size_bytes
            if not account[node.owner]:
                del account[node.owner]
