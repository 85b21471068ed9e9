"""Order log: what the followers must do, in the order in which rank 0 did it.

The inference thread adds orders, and so do the channel's and storage's threads that remove blocks which some
rank lacks. One thread per follower sends what was added since its last turn. If rank 0 drops a region, copy
or read, the next order is preceded by one to drop it: a number links it to what the followers keep.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import queue
import threading
from collections.abc import Sequence

from icehouse.group.v1.group_service_pb2 import FollowResponse, Order

from icehouse_server.domain.blocks import HostRegion
from icehouse_server.domain.ids import BlockHash
from icehouse_server.storage.api import KvTarget, TensorShape

ORDER_LIMIT = 16_384
"""How many orders a rank may be behind: far more than rank 0 adds between two passes, which all ranks run
together."""
_ORDERS_AT_ONCE = 256
_BYTES_AT_ONCE = 4 << 20
"""A single order with a long prompt may be larger."""


class OrderLog:
    """Any thread. All followers get the same orders in the same sequence."""

    def __init__(self, world: int) -> None:
        self._queues = {rank: queue.SimpleQueue[Order]() for rank in range(1, world)}
        self._numbers = itertools.count(1)
        self._adding = threading.Lock()
        self.behind: set[int] = set()
        """Ranks that take their orders too slowly, and get no more."""
        self._dropped: collections.deque[int] = collections.deque()
        """Appended to without the lock, because code that holds it may drop something."""
        self.order_count = 0
        """Orders to each follower, from the start."""
        self.sent_count = 0
        """Messages, to all followers."""
        self.sent_bytes = 0

    def number(self) -> int:
        """Return a number for something that the followers will keep."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Have the followers drop what they kept under a number."""
        self._dropped.append(number)

    def add(self, order: Order) -> None:
        """Have an order carried out after all others."""
        with self._adding:
            if self._dropped:
                dropping = Order()
                while self._dropped:
                    dropping.drop.numbers.append(self._dropped.popleft())
                self._put(dropping)
            self._put(order)

    def _put(self, order: Order) -> None:
        self.order_count += 1
        for rank, orders in self._queues.items():
            if orders.qsize() >= ORDER_LIMIT:
                self.behind.add(rank)
            if rank not in self.behind:
                orders.put(order)

    def take(self, rank: int, sequence: int, *, timeout_s: float) -> FollowResponse | None:
        """Return what a follower must do next, with the number of its first order; None if nothing comes
        within `timeout_s`."""
        orders = self._queues[rank]
        try:
            response = FollowResponse(sequence=sequence, orders=[orders.get(timeout=timeout_s)])
        except queue.Empty:
            return None
        size_bytes = response.ByteSize()
        while len(response.orders) < _ORDERS_AT_ONCE and size_bytes < _BYTES_AT_ONCE:
            try:
                order = orders.get_nowait()
            except queue.Empty:
                break
            size_bytes += order.ByteSize()
            response.orders.append(order)
        with self._adding:
            self.sent_count += 1
            self.sent_bytes += size_bytes
        return response


class KeptOnRanks:
    """Something on rank 0 that the followers keep, too, for as long as this exists."""

    def __init__(self, log: OrderLog) -> None:
        self._log = log
        self.number = log.number()

    def __del__(self) -> None:
        self._log.drop(self.number)


class GroupRead(KeptOnRanks):
    """A read from the SSD tiers of all ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTarget:
    """Implements KvTarget: pages of rank 0, linked to those of the same read on the followers."""

    own: KvTarget
    read: GroupRead

    def segments(
        self, tensors: Sequence[TensorShape], *, start_token_index: int, token_count: int
    ) -> list[memoryview]:
        return self.own.segments(tensors, start_token_index=start_token_index, token_count=token_count)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRegion(HostRegion):
    """A region that was read on every rank."""

    read: GroupRead
    hash: BlockHash


@dataclasses.dataclass(frozen=True, slots=True)
class CopiedRegion(HostRegion):
    """A region that was copied to host memory on every rank."""

    copy: KeptOnRanks
