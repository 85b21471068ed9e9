"""Event feed: what happened to blocks, in one channel for all events and one for each subscribed tenant.

Owned by the event loop. One limit for all channels bounds what is kept for readers that fall behind.
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Callable, Iterable, Iterator

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import EventsExpired, EventsLost, Reason
from icehouse_server.rpc.kv_events.block_mirror import (
    BlockMirror,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    Held,
    KvBatch,
    KvBlock,
    KvEvent,
    SnapshotChunk,
)


class EventFeed:
    """Keeps the latest batches, up to about `replay_limit_bytes`.

    Numbers begin at the wall clock's milliseconds. So a subscriber that returns to a restarted server has a
    number that this server never gave, and gets an error, unless there was more than one batch a millisecond.
    Subscribed tenants have credentials, so there are not many channels.
    """

    def __init__(self, mirror: BlockMirror, *, replay_limit_bytes: int, clock: Clock) -> None:
        self._mirror = mirror
        self._replay_limit_bytes = replay_limit_bytes
        self._clock = clock
        self._all = self._channel(None)
        self._of: dict[Tenant, Channel] = {}
        self._sharers: collections.deque[tuple[Channel, ...]] = collections.deque()
        """The channels that have a part of each kept batch."""
        self.ring_bytes = 0
        """About how much memory the kept batches take."""
        self.event_total = 0

    @property
    def lost_total(self) -> int:
        return self._all.lost_total + sum(channel.lost_total for channel in self._of.values())

    def publish(self, events: Iterable[KvEvent]) -> None:
        """Number events and keep them; wake the subscribers of the channels that got any."""
        touched: dict[Channel, None] = {}
        for part in parts_of(events):
            batch = self._all.append(part)
            sharers = self._share(part)
            self._add_to_replay(batch, sharers)
            self.event_total += len(part)
            touched.update(dict.fromkeys((self._all, *sharers)))
        for channel in touched:
            channel.wake()

    def subscribe(self, *, after_number: int, tenant: Tenant | None) -> Subscription:
        """Return the batches after `after_number`, of one tenant or of all; 0 begins with the current state.

        Raises EventsExpired if batches between that number and what is kept are missing.
        """
        return self.channel_of(tenant).subscribe(after_number=after_number)

    def channel_of(self, tenant: Tenant | None) -> Channel:
        """Return the channel of one tenant, which begins with its first subscription, or of all."""
        if tenant is None:
            return self._all
        channel = self._of.get(tenant)
        if channel is None:
            channel = self._of[tenant] = self._channel(tenant)
        return channel

    def _channel(self, tenant: Tenant | None) -> Channel:
        state = functools.partial(self._mirror.published_blocks, tenant)
        return Channel(state, number=int(self._clock.wall() * 1000), clock=self._clock)

    def _share(self, events: Iterable[KvEvent]) -> tuple[Channel, ...]:
        """Give each tenant's channel its own part of a batch; return the channels that got a part."""
        if not self._of:
            return ()
        parts: dict[Channel, list[KvEvent]] = {}
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved), f"an event of no tenant: {event}"
            if (channel := self._of.get(event.tenant)) is not None:
                parts.setdefault(channel, []).append(event)
        for channel, part in parts.items():
            channel.append(tuple(part))
        return tuple(parts)

    def _add_to_replay(self, batch: KvBatch, sharers: tuple[Channel, ...]) -> None:
        self._sharers.append(sharers)
        self.ring_bytes += size_bytes(batch)
        while self.ring_bytes > self._replay_limit_bytes and len(self._all) > 1:
            self.ring_bytes -= size_bytes(self._all.drop_oldest())
            for channel in self._sharers.popleft():
                channel.drop_oldest()


BATCH_TOKEN_COUNT = 32_768
"""Tokens of the blocks in one batch: about 100 kB as a message, far below what gRPC clients accept."""

State = list[tuple[KvBlock, Held]]


class BlockSnapshot:
    """The state at one number, cut into batches while it is read; shared by all readers that begin there."""

    def __init__(self, number: int, time: float, state: State) -> None:
        self.number = number
        self.block_count = len(state)
        self._time = time
        self._state = state
        self._size = max(1, BATCH_TOKEN_COUNT // (2 * state[0][0].token_count)) if state else 1
        self.chunk_count = max(1, -(-len(state) // self._size))
        self._stored_count = sum(len(held) for _, held in state)

    def chunk(self, index: int) -> KvBatch:
        """Return one of its batches; the last one has the snapshot's own number."""
        events: list[KvEvent] = [] if index else [BlocksCleared()]
        part = self._state[index * self._size : (index + 1) * self._size]
        events += (BlockStored(block, tier) for block, held in part for tier in held)
        about = SnapshotChunk(index, self.chunk_count, self._stored_count)
        return KvBatch(self.number - self.chunk_count + 1 + index, self._time, tuple(events), about)


class Channel:
    """The numbered batches of one tenant or of all. Its owner drops the oldest ones.

    A subscription is only a position in a channel: a stalled one costs nothing, and learns that it is too
    late when it asks for its next batch. Each channel numbers its own batches, so a tenant's numbers say
    nothing about other tenants.
    """

    def __init__(self, state: Callable[[], State], *, number: int, clock: Clock) -> None:
        self._state_of_now = state
        self._clock = clock
        self.last_number = number
        """The number of the latest batch; before there is one, the number before the first."""
        self._ring: collections.deque[KvBatch] = collections.deque()
        self._changed = asyncio.Event()
        self._latest: BlockSnapshot | None = None
        self._event_count = 0
        """Events since the latest snapshot."""
        self.lost_total = 0
        """Subscribers that fell too far behind."""

    def append(self, events: tuple[KvEvent, ...]) -> KvBatch:
        """Number events and keep them; `wake` notifies the waiting readers."""
        self.last_number += 1
        batch = KvBatch(self.last_number, self._clock.wall(), events)
        self._ring.append(batch)
        self._event_count += len(events)
        return batch

    def drop_oldest(self) -> KvBatch:
        """Drop the oldest batch, and the snapshot before it: nobody can begin with that any more."""
        dropped = self._ring.popleft()
        if self._latest is not None and self._latest.number < dropped.sequence_number:
            self._latest = None
        return dropped

    def __len__(self) -> int:
        return len(self._ring)

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        await self._changed.wait()

    def subscribe(self, *, after_number: int) -> Subscription:
        """Return the batches after `after_number`; 0 begins with the state.

        Raises EventsExpired if batches between that number and what is kept are missing.
        """
        if not after_number:
            snapshot = self._snapshot()
            return Subscription(self, snapshot.number, snapshot)
        self.require(after_number, began=False)
        return Subscription(self, after_number, None)

    def after(self, number: int) -> KvBatch | None:
        """Return the batch after this number, None if there is none yet; raises EventsLost."""
        if number == self.last_number:
            return None
        self.require(number, began=True)
        return self._ring[number + 1 - self._ring[0].sequence_number]

    def require(self, number: int, *, began: bool) -> None:
        """Raise if the batch after this number is not kept: EventsLost if `began`, else EventsExpired."""
        first = self._ring[0].sequence_number if self._ring else self.last_number + 1
        if first - 1 <= number <= self.last_number:
            return
        detail = (
            f"events after number {number} are no longer kept, only {first} to {self.last_number}; "
            "forget the earlier ones and subscribe from 0"
        )
        numbers = {"number": number, "first_number": first, "last_number": self.last_number}
        if began:
            self.lost_total += 1
            raise EventsLost(Reason.EVENTS_LOST, detail, metadata=numbers)
        raise EventsExpired(Reason.EVENTS_EXPIRED, detail, metadata=numbers)

    def _snapshot(self) -> BlockSnapshot:
        """Return a snapshot after which all events are kept.

        A new one is taken once more events have followed the latest than that has blocks. So snapshots cost
        less than the events did, however many subscribe. A reader that was overtaken drops its snapshot when
        it asks for the next batch; a reader that never asks is ended as stalled.
        """
        if self._latest is None or self._event_count > self._latest.block_count:
            self._latest = BlockSnapshot(self.last_number, self._clock.wall(), self._state_of_now())
            self._event_count = 0
        return self._latest


class Subscription:
    """One reader of a channel."""

    def __init__(self, channel: Channel, number: int, snapshot: BlockSnapshot | None) -> None:
        self._channel = channel
        self._number = number
        self._snapshot = snapshot
        self._index = 0

    def take(self) -> KvBatch | None:
        if self._snapshot is not None:
            return self._take_chunk(self._snapshot)
        batch = self._channel.after(self._number)
        if batch is not None:
            self._number = batch.sequence_number
        return batch

    async def wait(self) -> None:
        await self._channel.wait()

    def _take_chunk(self, snapshot: BlockSnapshot) -> KvBatch:
        self._channel.require(snapshot.number, began=True)
        chunk = snapshot.chunk(self._index)
        self._index += 1
        if self._index == snapshot.chunk_count:
            self._snapshot = None
        return chunk


def size_bytes(batch: KvBatch) -> int:
    """Return about how much memory a batch takes."""
    blocks = [event.block for event in batch.events if isinstance(event, BlockStored)]
    size = sum(len(block.packed_token_ids) + _IMAGE_BYTES * len(block.images) for block in blocks)
    return size + _EVENT_BYTES * (1 + len(batch.events))


def parts_of(events: Iterable[KvEvent]) -> Iterator[tuple[KvEvent, ...]]:
    """Yield the events in parts that make messages of moderate size."""
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


_BATCH_EVENT_COUNT = 1024
_EVENT_BYTES = 200
"""About how much memory an event takes besides its tokens."""
_IMAGE_BYTES = 200
