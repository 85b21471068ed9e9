"""Event feed: what happened to blocks, in a channel for all of it and one for each tenant that subscribed.

Owned by the event loop. What is kept for those who come back or fall behind is bounded over all channels: a
tenant's batch goes when the one that it is a part of does.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable

from icehouse_server.clock import Clock
from icehouse_server.domain.ids import Tenant
from icehouse_server.rpc.kv_events.channel import Channel, Subscription, parts_of, size_bytes
from icehouse_server.rpc.kv_events.events import BlockRemoved, BlockStored, KvBatch, KvEvent
from icehouse_server.rpc.kv_events.mirror import BlockMirror


class EventFeed:
    """Keeps the latest batches, of about `replay_limit_bytes`.

    Numbers begin at the wall clock's milliseconds: a subscriber that comes back to a restarted server has a
    number that this one never gave, and is told so, as long as fewer batches than one a millisecond are made.
    Tenants that subscribe have proved who they are, so there are not many channels.
    """

    def __init__(self, mirror: BlockMirror, *, replay_limit_bytes: int, clock: Clock) -> None:
        self._mirror = mirror
        self._replay_limit_bytes = replay_limit_bytes
        self._clock = clock
        self._all = self._channel(None)
        self._of: dict[Tenant, Channel] = {}
        self._sharers: collections.deque[tuple[Channel, ...]] = collections.deque()
        """For each batch that is kept, the channels that have a part of it."""
        self._ring_bytes = 0
        self._sinks: list[Callable[[KvBatch], None]] = []
        self.event_total = 0

    @property
    def ring_bytes(self) -> int:
        """About what the kept batches take."""
        return self._ring_bytes

    @property
    def lost_total(self) -> int:
        """Subscribers that were overtaken."""
        return self._all.lost_total + sum(channel.lost_total for channel in self._of.values())

    def add_sink(self, sink: Callable[[KvBatch], None]) -> None:
        """Call `sink` with each batch as it is made; it must not block."""
        self._sinks.append(sink)

    def publish(self, events: Iterable[KvEvent]) -> None:
        """Number events and keep them for whoever reads; those whom they concern are woken once."""
        touched: dict[Channel, None] = {}
        for part in parts_of(events):
            batch = self._all.append(part)
            sharers = self._share(part)
            self._keep(batch, sharers)
            for sink in self._sinks:
                sink(batch)
            self.event_total += len(part)
            touched.update(dict.fromkeys((self._all, *sharers)))
        for channel in touched:
            channel.wake()

    def subscribe(self, *, after_number: int, tenant: Tenant | None) -> Subscription:
        """Return what follows `after_number`, of one tenant or of all; 0 begins with the state as it is.

        Raises EventsExpired where batches are missing between that number and what is kept.
        """
        return self.channel_of(tenant).subscribe(after_number=after_number)

    def channel_of(self, tenant: Tenant | None) -> Channel:
        """Return the batches of one tenant, from its first subscription on, or of all."""
        if tenant is None:
            return self._all
        channel = self._of.get(tenant)
        if channel is None:
            channel = self._of[tenant] = self._channel(tenant)
        return channel

    def _channel(self, tenant: Tenant | None) -> Channel:
        state = functools.partial(self._mirror.told, tenant)
        return Channel(state, number=int(self._clock.wall() * 1000), clock=self._clock)

    def _share(self, events: Iterable[KvEvent]) -> tuple[Channel, ...]:
        """Give each tenant's channel what is its own of a batch; return those that had some."""
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

    def _keep(self, batch: KvBatch, sharers: tuple[Channel, ...]) -> None:
        self._sharers.append(sharers)
        self._ring_bytes += size_bytes(batch)
        while self._ring_bytes > self._replay_limit_bytes and len(self._all) > 1:
            self._ring_bytes -= size_bytes(self._all.drop_oldest())
            for channel in self._sharers.popleft():
                channel.drop_oldest()
