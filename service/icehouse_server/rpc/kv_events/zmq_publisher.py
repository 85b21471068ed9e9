"""ZeroMQ publisher: one tenant's KV events of each model, in llm-d's format of three frames a batch.

Owned by the event loop; one subscriber of each model's feed. Publishing never waits: a slow subscriber loses
messages in its bounded queue, and sees that numbers are missing. For each new subscriber the state is
published again, a part at a time, then what has changed since. That is harmless for the others.

Frames are topic, number of 8 bytes (big-endian), and msgpack of [time, events, rank]. An event is an array
that begins with its name, as in vLLM. Needs the optional package pyzmq, so it is imported only for a
configured endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import msgpack
import zmq

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import unpack_tokens
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import Tenant
from icehouse_server.errors import EventsLost, Reason, StartError
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.kv_events.block_mirror import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from icehouse_server.rpc.kv_events.event_feed import EventFeed
from icehouse_server.rpc.kv_events.kv_event_source import CONNECT_PREFIX, KvEventSource

_QUEUE_LIMIT = 1_000
"""Most messages, each at most 100 kB or so, that wait for one subscriber; it loses further ones."""
_REPUBLISH_S = 5.0
"""Least seconds between two republications of the whole state."""
_PAUSE_S = 0.01
"""Pause between two batches, which each take some milliseconds of the event loop."""
_RECEIVE_LIMIT = 64
"""Most subscribers' messages that are read in one turn: they may send without end."""
_SUBSCRIPTION_BYTE_LIMIT = 4 << 10
"""Longest message of a subscriber, which names a topic's prefix. Who sends more is disconnected."""
_MEDIA = {Tier.RAM: "GPU", Tier.SSD: "CPU"}
"""With these names, llm-d gives the second tier less weight."""
_MASK = (1 << 64) - 1


class ZmqPublisher:
    """Listens, or connects to a subscriber that does. Each model has a topic with its own message numbers."""

    def __init__(self, *, endpoint: str, tenant: Tenant, interval_s: float, clock: Clock) -> None:
        self._endpoint = endpoint
        self._tenant = tenant
        self._interval_s = interval_s
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.XPUB)
        self._topics: dict[str, _Topic] = {}
        self._is_republish_due = False
        self._republish_time = -_REPUBLISH_S
        self._task: asyncio.Task[None] | None = None

    def add(self, topic: str, source: KvEventSource) -> None:
        """Publish a model's state, and its changes. Call this after `open`."""
        source.follow(self._tenant)
        self._topics[topic] = _Topic(topic.encode(), source.feed, self._tenant)

    def remove(self, topic: str) -> None:
        """Stop publishing a model. Its blocks on SSD are still there when it is loaded again."""
        self._topics.pop(topic, None)

    def start(self) -> str:
        """Open the endpoint and start the task that publishes; return the address."""
        endpoint = self.open()
        self._task = background.start(self._run(), name="kv-events-zmq")
        return endpoint

    def open(self) -> str:
        """Open the endpoint; return its address. Raises StartError if it cannot be opened."""
        # Report every subscription, even a second one to a topic: for each the state is published.
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE_LIMIT)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _SUBSCRIPTION_BYTE_LIMIT)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            if self._endpoint.startswith(CONNECT_PREFIX):
                self._socket.connect(self._endpoint.removeprefix(CONNECT_PREFIX))
            else:
                self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartError(
                Reason.ADDRESS_IN_USE,
                f"the ZeroMQ endpoint {self._endpoint!r} cannot be opened: {error}; "
                "choose another kv_events.zmq_endpoint",
                metadata={"endpoint": self._endpoint},
            ) from error
        endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return endpoint

    async def stop(self) -> None:
        """Close the endpoint; unsent messages are lost."""
        if self._task is not None:
            await background.end(self._task)
        self._context.destroy(linger=0)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PAUSE_S if self.turn() else self._interval_s)

    def turn(self) -> bool:
        """Check for new subscribers and publish each model's next batch; return whether there may be more.

        A state that was begun is finished before it is begun again: subscribers that keep reconnecting must
        not keep the last blocks from others.
        """
        self._is_republish_due |= self.hear()
        if sum(self._publish(topic) for topic in self._topics.values()):
            return True
        if self._is_republish_due and self._clock.monotonic() - self._republish_time >= _REPUBLISH_S:
            self.republish()
            return True
        return False

    def _publish(self, topic: _Topic) -> bool:
        """Publish a model's next batch; return whether there may be more."""
        try:
            batch = topic.subscription.take()
        except EventsLost:
            # All subscribers must forget what they know: some removals were never published.
            self._send(topic, [BlocksCleared()], time=self._clock.wall())
            topic.begin()
            return True
        if batch is not None:
            # Only a state has this event, and subscribers that already know blocks need not forget them.
            events = [event for event in batch.events if not isinstance(event, BlocksCleared)]
            self._send(topic, events, time=batch.time)
        return batch is not None

    def hear(self) -> bool:
        """Read subscribers' messages; return whether there is a new subscriber."""
        has_come = False
        with contextlib.suppress(zmq.Again):
            for _ in range(_RECEIVE_LIMIT):
                has_come |= self._socket.recv(zmq.NOBLOCK).startswith(b"\x01")
        return has_come

    def republish(self) -> None:
        """Publish the whole state of each model again."""
        self._is_republish_due = False
        self._republish_time = self._clock.monotonic()
        for topic in self._topics.values():
            topic.begin()

    def _send(self, topic: _Topic, events: Iterable[KvEvent], *, time: float) -> None:
        packed = pack_batch(events, time=time)
        if packed is None:
            return
        frames = [topic.name, topic.number.to_bytes(8, "big"), packed]
        topic.number += 1
        with contextlib.suppress(zmq.Again):  # no subscriber is connected, or its queue is full
            self._socket.send_multipart(frames, zmq.NOBLOCK)


class _Topic:
    """What is published of one model: first its state, then its changes."""

    def __init__(self, name: bytes, feed: EventFeed, tenant: Tenant) -> None:
        self.name = name
        self._feed = feed
        self._tenant = tenant
        self.number = 0
        """The number of the next message."""
        self.begin()

    def begin(self) -> None:
        """Begin again with the state."""
        self.subscription = self._feed.subscribe(after_number=0, tenant=self._tenant)


def pack_batch(events: Iterable[KvEvent], *, time: float) -> bytes | None:
    """Return the third frame of a message; None for no events."""
    rows = [_row(event) for event in events]
    if not rows:
        return None
    packed = msgpack.packb([time, rows, 0], use_single_float=False)
    assert isinstance(packed, bytes)
    return packed


def _row(event: KvEvent) -> list[object]:
    if isinstance(event, BlockStored):
        block = event.block
        parent = None if block.parent is None else block.parent & _MASK
        tokens = list(unpack_tokens(block.packed_token_ids))
        adapter = block.scope.adapter or None
        row: list[object] = [
            *("BlockStored", [block.hash & _MASK], parent, tokens, block.token_count),
            *(None, _MEDIA[event.tier], adapter),
        ]
        # `extra_keys`, one list for each block; omitted if there are none, as in vLLM.
        return [*row, [block.images]] if block.images else row
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", [event.hash & _MASK], _MEDIA[event.tier]]
    return ["AllBlocksCleared"]
