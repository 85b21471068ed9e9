"""Event feed: numbered batches in a bounded ring, and subscribers that read it at their own pace.

Owned by the event loop. A subscriber is a place in the ring and no more: one that stalls costs nobody
anything, and learns that it was overtaken when it comes for its next batch.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import EventsExpired, EventsLost, Reason
from icehouse_server.rpc.kv_events.events import (
    BlocksCleared,
    BlockStored,
    KvBatch,
    KvBlock,
    KvEvent,
    SnapshotChunk,
)
from icehouse_server.rpc.kv_events.mirror import BlockMirror, Held

BATCH_TOKEN_COUNT = 32_768
"""Tokens of the blocks in one batch: some 100 kB as a message, far below what clients of gRPC accept."""

_BATCH_EVENT_COUNT = 1024
_EVENT_BYTES = 200
"""What an event takes in the ring beside its tokens, about."""


class EventFeed:
    """Keeps the latest batches, of about `replay_limit_bytes`, for those who come back or fall behind.

    Numbers begin at the wall clock's milliseconds: a subscriber that comes back to a restarted server has a
    number that this one never gave, and is told so, as long as fewer batches than one a millisecond are made.
    """

    def __init__(self, mirror: BlockMirror, *, replay_limit_bytes: int, clock: Clock) -> None:
        self._mirror = mirror
        self._replay_limit_bytes = replay_limit_bytes
        self._clock = clock
        self._last_number = int(clock.wall() * 1000)
        self._ring: collections.deque[KvBatch] = collections.deque()
        self._ring_bytes = 0
        self._changed = asyncio.Event()
        self._sinks: list[Callable[[KvBatch], None]] = []
        self.lost_total = 0
        """Subscribers that were overtaken."""
        self.event_total = 0

    @property
    def last_number(self) -> int:
        """The number of the latest batch; before the first one, the number before it."""
        return self._last_number

    @property
    def ring_bytes(self) -> int:
        """About what the kept batches take."""
        return self._ring_bytes

    def add_sink(self, sink: Callable[[KvBatch], None]) -> None:
        """Call `sink` with each batch as it is made; it must not block."""
        self._sinks.append(sink)

    def publish(self, events: Iterable[KvEvent]) -> None:
        """Number events and keep them for whoever reads; those who wait are woken once."""
        has_events = False
        for part in _parts(events):
            self._last_number += 1
            batch = KvBatch(self._last_number, self._clock.wall(), part)
            self._keep(batch)
            for sink in self._sinks:
                sink(batch)
            self.event_total += len(part)
            has_events = True
        if has_events:
            self._changed.set()
            self._changed = asyncio.Event()

    def subscribe(self, *, after_number: int, tenant: Tenant | None) -> Subscription:
        """Return what follows `after_number`, of one tenant or of all; 0 begins with the state as it is.

        Raises EventsExpired where batches are missing between that number and what is kept.
        """
        if not after_number:
            return Subscription(self, self._last_number, tenant, self._snapshot(tenant))
        self._require(after_number, began=False)
        return Subscription(self, after_number, tenant, iter(()))

    def after(self, number: int) -> KvBatch | None:
        """Return the batch behind this one, None when it is yet to come; raises EventsLost."""
        if number == self._last_number:
            return None
        self._require(number, began=True)
        return self._ring[number + 1 - self._ring[0].sequence_number]

    async def wait(self) -> None:
        """Return when the next batch has come."""
        await self._changed.wait()

    def _require(self, number: int, *, began: bool) -> None:
        first = self._ring[0].sequence_number if self._ring else self._last_number + 1
        if first - 1 <= number <= self._last_number:
            return
        detail = (
            f"the events after number {number} are not kept, those of {first} to {self._last_number} are; "
            "forget what was told and subscribe from 0"
        )
        numbers = {"number": number, "first_number": first, "last_number": self._last_number}
        if began:
            self.lost_total += 1
            raise EventsLost(Reason.EVENTS_LOST, detail, metadata=numbers)
        raise EventsExpired(Reason.EVENTS_EXPIRED, detail, metadata=numbers)

    def _keep(self, batch: KvBatch) -> None:
        self._ring.append(batch)
        self._ring_bytes += _size_bytes(batch)
        while self._ring_bytes > self._replay_limit_bytes and len(self._ring) > 1:
            self._ring_bytes -= _size_bytes(self._ring.popleft())

    def _snapshot(self, tenant: Tenant | None) -> Iterator[KvBatch]:
        """Yield the state of now in parts, made one by one when they are wanted; their numbers end at the
        latest batch's."""
        told = self._mirror.told()
        stored = [pair for pair in told if tenant is None or pair[0].scope.tenant == tenant]
        number, time = self._last_number, self._clock.wall()
        size = max(1, BATCH_TOKEN_COUNT // (2 * stored[0][0].token_count)) if stored else 1
        chunk_count = max(1, -(-len(stored) // size))
        stored_count = sum(len(held) for _, held in stored)

        def chunk(index: int) -> KvBatch:
            events: list[KvEvent] = [] if index else [BlocksCleared()]
            events += _stored_events(stored[index * size : (index + 1) * size])
            about = SnapshotChunk(index, chunk_count, stored_count)
            return KvBatch(number - chunk_count + 1 + index, time, tuple(events), about)

        return map(chunk, range(chunk_count))


class Subscription:
    """One reader of a feed: what is ready comes at once, and `None` when there is nothing yet."""

    def __init__(
        self, feed: EventFeed, after_number: int, tenant: Tenant | None, snapshot: Iterator[KvBatch]
    ) -> None:
        self._feed = feed
        self._number = after_number
        self._tenant = tenant
        self._snapshot = snapshot

    def take(self) -> KvBatch | None:
        """Return the next batch, with the events that are for this reader; raises EventsLost."""
        chunk = next(self._snapshot, None)
        if chunk is not None:
            return chunk
        batch = self._feed.after(self._number)
        if batch is None:
            return None
        self._number = batch.sequence_number
        if self._tenant is None:
            return batch
        events = tuple(event for event in batch.events if _is_for(event, self._tenant))
        return KvBatch(batch.sequence_number, batch.time, events)

    async def next(self, *, timeout_s: float) -> KvBatch | None:
        """Return the next batch when it has come; None when none has in that time. Raises EventsLost."""
        batch = self.take()
        if batch is not None:
            return batch
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._feed.wait()
        return self.take()


def _stored_events(stored: Iterable[tuple[KvBlock, Held]]) -> Iterator[BlockStored]:
    return (BlockStored(block, tier) for block, held in stored for tier in held)


def _is_for(event: KvEvent, tenant: Tenant) -> bool:
    return isinstance(event, BlocksCleared) or event.tenant == tenant


def _parts(events: Iterable[KvEvent]) -> Iterator[tuple[KvEvent, ...]]:
    """Yield the events in parts that make messages of a modest size."""
    part: list[KvEvent] = []
    token_count = 0
    for event in events:
        added = event.block.token_count if isinstance(event, BlockStored) else 0
        if part and (token_count + added > BATCH_TOKEN_COUNT or len(part) >= _BATCH_EVENT_COUNT):
            yield tuple(part)
            part, token_count = [], 0
        part.append(event)
        token_count += added
    if part:
        yield tuple(part)


def _size_bytes(batch: KvBatch) -> int:
    tokens = (len(event.block.packed_token_ids) for event in batch.events if isinstance(event, BlockStored))
    return sum(tokens) + _EVENT_BYTES * (1 + len(batch.events))
