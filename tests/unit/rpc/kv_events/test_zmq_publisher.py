"""ZeroMQ messages to the byte, and as a subscriber of one's own reads them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from icehouse_server.clock import Clock, SystemClock
from icehouse_server.domain.blocks import pack_tokens
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import AdapterName, BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.block_log import BlockLog, Came, Change, Left, RootsKnown
from icehouse_server.errors import StartError
from icehouse_server.rpc.kv_events import event_feed
from icehouse_server.rpc.kv_events.block_mirror import (
    BlockImage,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    KvBlock,
)

from tests.fixtures.engine import FakeClock
from tests.fixtures.kv_event_source import source_of

zmq = pytest.importorskip("zmq", reason="pyzmq comes with the extra fleet")
msgpack = pytest.importorskip("msgpack", reason="msgpack comes with the extra fleet")

from icehouse_server.rpc.kv_events.zmq_publisher import ZmqPublisher, pack_batch  # noqa: E402

FIRST = KvBlock(0x0102030405060708, None, pack_tokens([1, 2, 300, 70_000]), CacheScope())
SECOND = KvBlock(-2, FIRST.hash, pack_tokens([5, 6, 7, 8]), CacheScope(adapter=AdapterName("formal")))

GOLDEN = bytes.fromhex(
    "93"  # [time, events, rank]
    "cb41d954fc40100000"  # 1700000000.25
    "93"
    "98ab426c6f636b53746f726564"  # ["BlockStored", ...] of eight
    "91cf0102030405060708"  # [hash]
    "c0"  # no parent
    "940102cd012cce00011170"  # token ids
    "04"  # block size
    "c0a3475055c0"  # no number of an adapter, "GPU", no adapter
    "98ab426c6f636b53746f726564"
    "91cffffffffffffffffe"  # -2 as 64 bits
    "cf0102030405060708"  # its parent
    "9405060708"
    "04"
    "c0a3435055a6666f726d616c"  # "CPU", "formal"
    "93ac426c6f636b52656d6f766564"  # ["BlockRemoved", ...] of three
    "91cf0102030405060708"
    "a3475055"
    "00"  # rank
)


def test_a_batch_is_these_bytes() -> None:
    events = [
        BlockStored(FIRST, Tier.RAM),
        BlockStored(SECOND, Tier.SSD),
        BlockRemoved(FIRST.hash, Tier.RAM, Tenant("")),
    ]
    assert pack_batch(events, time=1_700_000_000.25) == GOLDEN


def test_images_are_the_last_field_of_their_block() -> None:
    """As vLLM has `extra_keys`: for each block of the event a list, of an identifier and an offset each."""
    images = (BlockImage("ca", -3), BlockImage("d0", 2))
    packed = pack_batch([BlockStored(dataclasses.replace(SECOND, images=images), Tier.RAM)], time=0.0)
    assert packed is not None
    (row,) = msgpack.unpackb(packed)[1]
    assert row[7:] == ["formal", [[["ca", -3], ["d0", 2]]]] and row[0] == "BlockStored"


def test_nothing_is_no_message_and_all_is_cleared_by_its_name() -> None:
    assert pack_batch([], time=0.0) is None
    packed = pack_batch([BlocksCleared()], time=0.0)
    assert packed is not None and msgpack.unpackb(packed) == [0.0, [["AllBlocksCleared"]], 0]


ROOTS = {Tenant(""): BlockHash(b"o" * 32), Tenant("other"): BlockHash(b"p" * 32)}


def block(number: int, tenant: str = "") -> Came:
    name = BlockHash(number.to_bytes(8, "big") * 4)
    return Came(Tier.RAM, name, ROOTS[Tenant(tenant)], True, 4, (number,) * 4)


TOPIC = "kv@here@model"


def publisher_at(endpoint: str, clock: Clock | None = None) -> ZmqPublisher:
    return ZmqPublisher(endpoint=endpoint, tenant=Tenant(""), interval_s=0.001, clock=clock or SystemClock())


class Published:
    """A publisher on a loopback port and what its source is fed with."""

    def __init__(self) -> None:
        self.source = source_of(BlockLog(), block_token_count=4)
        self.publisher = publisher_at("tcp://127.0.0.1:*")
        self.tell(RootsKnown(tuple((root, CacheScope(tenant)) for tenant, root in ROOTS.items())))
        self.endpoint = self.publisher.open()
        self.publisher.add(TOPIC, self.source)
        while self.publisher.turn():
            pass
        self.sockets: list[Any] = []
        self.context = zmq.Context()

    def tell(self, *changes: Change) -> None:
        self.source.feed.publish(self.source.mirror.apply(changes))

    async def subscriber(self) -> Any:
        """Return a subscriber that the publisher has heard of."""
        socket = self.context.socket(zmq.SUB)
        self.sockets.append(socket)
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        socket.connect(self.endpoint)
        while not self.publisher.hear():
            await asyncio.sleep(0)
        return socket

    async def read(self, socket: Any) -> tuple[int, list[Any]]:
        """Return number and events of the next message."""
        while not socket.poll(0):
            self.publisher.turn()
            await asyncio.sleep(0)
        topic, number, packed = socket.recv_multipart()
        assert topic.decode() == TOPIC and len(number) == 8
        _, events, rank = msgpack.unpackb(packed)
        assert rank == 0
        return int.from_bytes(number, "big"), events

    async def close(self) -> None:
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()
        await self.publisher.stop()


@pytest.fixture
async def published() -> AsyncIterator[Published]:
    made = Published()
    yield made
    await made.close()


async def test_a_subscriber_reads_one_tenants_events_in_order(published: Published) -> None:
    socket = await published.subscriber()
    published.tell(block(1), block(2, "other"))
    published.tell(block(3, "other"))
    published.tell(Left(Tier.RAM, block(1).name), Left(Tier.RAM, block(2, "other").name))
    first = await published.read(socket)
    assert first == (0, [["BlockStored", [1], None, [1, 1, 1, 1], 4, None, "GPU", None]])
    assert await published.read(socket) == (1, [["BlockRemoved", [1], "GPU"]])


async def test_whoever_comes_late_is_told_everything_as_it_is_then(published: Published) -> None:
    published.tell(block(1), block(2), block(3), block(4, "other"))
    socket = await published.subscriber()
    published.publisher.republish()
    published.tell(Left(Tier.RAM, block(2).name))
    _, events = await published.read(socket)
    assert [event[:2] for event in events] == [["BlockStored", [number]] for number in (1, 2, 3)]
    _, removed = await published.read(socket)
    assert removed == [["BlockRemoved", [2], "GPU"]]


async def test_what_comes_while_everything_is_told_again_is_told_behind_its_parent(
    published: Published,
) -> None:
    published.tell(block(1))
    socket = await published.subscriber()
    published.publisher.republish()
    published.tell(Came(Tier.RAM, block(2).name, block(1).name, False, 4, (2,) * 4))
    told: list[list[int]] = []
    while len(told) < 2:
        _, events = await published.read(socket)
        told += [event[1] for event in events]
    assert told == [[1], [2]]


async def test_where_events_were_lost_all_is_cleared_and_told_again(published: Published) -> None:
    socket = await published.subscriber()
    published.source.feed._replay_limit_bytes = 1_000
    for number in range(50):
        published.tell(block(number))
    assert (await published.read(socket))[1] == [["AllBlocksCleared"]]
    _, events = await published.read(socket)
    assert [event[1] for event in events] == [[number] for number in range(50)]


async def test_a_subscriber_that_reads_nothing_holds_nobody_up(published: Published) -> None:
    stalled = await published.subscriber()
    for number in range(3_000):
        published.tell(block(number))
        published.publisher.turn()
    reader = await published.subscriber()
    published.tell(block(5_000))
    number, _ = await published.read(reader)
    assert number == 3_000
    assert (await published.read(stalled))[0] == 0


class Peers:
    """Stands for the socket: subscriptions that wait to be taken in, and what was sent."""

    def __init__(self, *, is_endless: bool = False) -> None:
        self.is_endless = is_endless
        self.waiting_count = 0
        self.heard_count = 0
        self.sent: list[int] = []

    def recv(self, flags: int) -> bytes:
        if not self.is_endless and not self.waiting_count:
            raise zmq.Again
        self.waiting_count -= 1
        self.heard_count += 1
        return b"\x01kv@"

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self.sent += [row[1][0] for row in msgpack.unpackb(frames[2])[1]]


def beside(peers: Peers, clock: FakeClock, *, block_count: int) -> ZmqPublisher:
    """Return a publisher that was opened on these peers, and knows of so many blocks."""
    source = source_of(BlockLog(), block_token_count=4)
    roots = RootsKnown(((ROOTS[Tenant("")], CacheScope()),))
    source.feed.publish(source.mirror.apply([roots, *(block(number) for number in range(block_count))]))
    publisher = publisher_at("inproc://here", clock)
    publisher._context.destroy(linger=0)
    publisher._socket = Peers()  # type: ignore[assignment]
    publisher.add(TOPIC, source)
    while publisher.turn():
        pass
    publisher._socket = peers  # type: ignore[assignment]
    return publisher


async def test_peers_that_send_without_end_hold_a_turn_no_longer_than_its_share() -> None:
    peers = Peers(is_endless=True)
    assert beside(peers, FakeClock(), block_count=0).hear()
    assert peers.heard_count == 64


async def test_everything_is_told_to_its_end_before_it_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many turns as twenty thousand blocks of the usual length take.
    monkeypatch.setattr(event_feed, "BATCH_TOKEN_COUNT", 2 * 128 * 4)
    peers, clock = Peers(), FakeClock()
    publisher = beside(peers, clock, block_count=20_000)
    heard_from = []
    for turn in range(400):
        if turn in (0, 100):
            peers.waiting_count += 1
            heard_from.append(len(peers.sent))
        publisher.turn()
        clock.now += 0.05
    assert all(set(peers.sent[start:]) == set(range(20_000)) for start in heard_from)
    assert len(peers.sent) == 40_000


async def test_who_subscribes_to_more_than_a_topic_is_sent_away(published: Published) -> None:
    socket = published.context.socket(zmq.SUB)
    published.sockets.append(socket)
    events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    published.sockets.append(events)
    socket.connect(published.endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"k" * 8192)
    while not events.poll(0):
        assert not published.publisher.hear()
        await asyncio.sleep(0)
    socket.disable_monitor()


async def test_an_endpoint_that_is_taken_is_named(published: Published) -> None:
    second = publisher_at(published.endpoint)
    with pytest.raises(StartError, match=r"127\.0\.0\.1"):
        second.open()


async def test_it_connects_to_a_subscriber_that_listens() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, "")
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    source = source_of(BlockLog(), block_token_count=4)
    source.feed.publish(source.mirror.apply([RootsKnown(((ROOTS[Tenant("")], CacheScope()),))]))
    publisher = publisher_at(f"connect:tcp://127.0.0.1:{port}")
    publisher.open()
    publisher.add(TOPIC, source)
    while not publisher.hear():
        # A socket subscribes with its new connections when it is looked at.
        assert not socket.poll(0)
        await asyncio.sleep(0)
    source.feed.publish(source.mirror.apply([block(1)]))
    while not socket.poll(0):
        publisher.turn()
        await asyncio.sleep(0)
    assert socket.recv_multipart()[1] == bytes(8)
    socket.close(linger=0)
    context.term()
    await publisher.stop()


async def test_each_model_has_its_topic_and_numbers_and_comes_back_with_what_it_has(
    published: Published,
) -> None:
    socket = await published.subscriber()
    published.tell(block(1))
    assert (await published.read(socket))[0] == 0
    other = source_of(BlockLog(), block_token_count=4)
    other.feed.publish(other.mirror.apply([RootsKnown(((ROOTS[Tenant("")], CacheScope()),)), block(7)]))
    for _ in range(2):
        # Loaded for the first time, and again.
        published.publisher.add("kv@here@other", other)
        while not socket.poll(0):
            published.publisher.turn()
        topic, number, packed = socket.recv_multipart()
        assert (topic, number) == (b"kv@here@other", bytes(8))
        assert [event[:2] for event in msgpack.unpackb(packed)[1]] == [["BlockStored", [7]]]
        published.publisher.remove("kv@here@other")
        other.feed.publish(other.mirror.apply([block(8), Left(Tier.RAM, block(8).name)]))
    published.tell(block(2))
    assert (await published.read(socket))[0] == 1
