"""ZeroMQ publisher: one tenant's KV events as llm-d reads them, three frames a batch.

Owned by the event loop, and called for each batch as it is made, so that it misses none. Publishing never
waits: a slow subscriber loses messages in its bounded queue, and sees that numbers are missing. For each new
subscriber all blocks are published again, a few at a time, which is harmless for the others.

Frames are topic, number of 8 bytes (big-endian), and msgpack of [time, events, rank]. An event is an array
that begins with its name, as in vLLM. Needs the optional package pyzmq, so it is imported only for a
configured endpoint.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable

import msgpack
import zmq

from icehouse_server.clock import Clock
from icehouse_server.domain.blocks import unpack_tokens
from icehouse_server.domain.ids import BlockHash, Tenant
from icehouse_server.engine.core.block_log import KvTier
from icehouse_server.errors import Reason, StartError
from icehouse_server.rpc.calls import background
from icehouse_server.rpc.kv_events.block_mirror import BlockRemoved, BlockStored, KvBatch, KvEvent
from icehouse_server.rpc.kv_events.event_feed import BATCH_TOKEN_COUNT
from icehouse_server.rpc.kv_events.kv_event_source import CONNECT_PREFIX, KvEventSource

_QUEUE_LIMIT = 1_000
"""Messages of at most 100 kB or so that wait for one subscriber; further ones are lost to it."""
_REPUBLISH_S = 5.0
"""The least time between two times that everything is published again."""
_RECEIVE_LIMIT = 64
"""Messages of subscribers that are read in one turn: they may send without end."""
_SUBSCRIPTION_BYTE_LIMIT = 4 << 10
"""Longest message of a subscriber, which names the beginning of a topic. Who sends more is disconnected."""
_MEDIA = {KvTier.RAM: "GPU", KvTier.SSD: "CPU"}
"""By this name llm-d gives the second tier less weight."""
_MASK = (1 << 64) - 1


class ZmqPublisher:
    """Listens, or connects to a subscriber that does."""

    def __init__(
        self, source: KvEventSource, *, endpoint: str, topic: Callable[[], str], tenant: Tenant, clock: Clock
    ) -> None:
        self._source = source
        self._endpoint = endpoint
        self._topic = topic
        self._tenant = tenant
        self._clock = clock
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.XPUB)
        self._to_republish: collections.deque[BlockHash] = collections.deque()
        self._late_count = 0
        """Events that came while everything was published again; their blocks are published once more at the
        end."""
        self._is_republish_due = False
        self._republish_time = -_REPUBLISH_S
        self._task: asyncio.Task[None] | None = None

    def start(self) -> str:
        """Open the endpoint and publish everything to new subscribers; return its address."""
        endpoint = self.open()
        self._task = background.start(self._run(), name="kv-events-zmq")
        return endpoint

    def open(self) -> str:
        """Begin to publish; return the address. Raises StartError if the endpoint cannot be opened."""
        # Report every subscription, also a second one to a topic: everything is published for each.
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
                f"the ZeroMQ endpoint {self._endpoint!r} cannot be had: {error}; "
                "choose another kv_events.zmq_endpoint",
                metadata={"endpoint": self._endpoint},
            ) from error
        self._source.feed.add_sink(self.publish)
        self._source.follow(self._tenant)
        endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return endpoint

    async def stop(self) -> None:
        """Close the endpoint; what has not been sent is lost."""
        if self._task is not None:
            await background.end(self._task)
        self._context.destroy(linger=0)

    def publish(self, batch: KvBatch) -> None:
        """Send the part of a batch that is this tenant's.

        A new subscriber may not know the parents of its blocks yet, so these are published once more later.
        """
        mine = [event for event in batch.events if self._is_mine(event)]
        self._send(mine, time=batch.time)
        if self._is_republishing:
            self._late_count += sum(isinstance(event, BlockStored) for event in mine)

    def turn(self) -> bool:
        """Look for new subscribers and publish the next batch of everything; return whether any came."""
        has_come = False
        with contextlib.suppress(zmq.Again):
            for _ in range(_RECEIVE_LIMIT):
                has_come |= self._socket.recv(zmq.NOBLOCK).startswith(b"\x01")
        self._is_republish_due |= has_come
        self._republish()
        return has_come

    async def _run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(self._source.interval_s)

    def step(self) -> None:
        """Take a turn, and begin to publish everything again if that is due."""
        self.turn()
        # One that has begun is finished first: whoever keeps coming must not keep the last blocks from
        # others.
        is_free = not self._is_republishing and self._clock.monotonic() - self._republish_time >= _REPUBLISH_S
        if self._is_republish_due and is_free:
            self._republish_time = self._clock.monotonic()
            self.begin_republishing()

    def begin_republishing(self) -> None:
        self._is_republish_due = False
        self._to_republish = collections.deque(self._source.mirror.published_names(self._tenant))

    def _republish(self) -> None:
        """Publish the next blocks as they are now, not as they were at the beginning."""
        events: list[KvEvent] = []
        token_count = 0
        while self._is_republishing and token_count < BATCH_TOKEN_COUNT:
            if not self._to_republish:
                self._to_republish.extend(
                    self._source.mirror.last_published_names(self._tenant, self._late_count)
                )
                self._late_count = 0
                continue
            for block, held in self._source.mirror.published_block(self._to_republish.popleft()):
                events += [BlockStored(block, tier) for tier in held]
                token_count += block.token_count * len(held)
        self._send([event for event in events if self._is_mine(event)], time=self._clock.wall())

    @property
    def _is_republishing(self) -> bool:
        return bool(self._to_republish) or self._late_count > 0

    def _is_mine(self, event: KvEvent) -> bool:
        return isinstance(event, BlockStored | BlockRemoved) and event.tenant == self._tenant

    def _send(self, events: Iterable[KvEvent], *, time: float) -> None:
        packed = pack_batch(events, time=time)
        if packed is None:
            return
        frames = [self._topic().encode(), self._number.to_bytes(8, "big"), packed]
        self._number += 1
        with contextlib.suppress(zmq.Again):  # nobody there that connects, or its queue is full
            self._socket.send_multipart(frames, zmq.NOBLOCK)


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
        # `extra_keys`, one list for each block; as vLLM does, left out where there are none.
        return [*row, [block.images]] if block.images else row
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", [event.hash & _MASK], _MEDIA[event.tier]]
    return ["AllBlocksCleared"]
