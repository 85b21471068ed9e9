"""KV events as gateways read them: places, salts, snapshots, and a load record on everything."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hyperframe.frame import HeadersFrame
from icehouse_server.domain.blocks import pack_tokens
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import AdapterName, BlockHash, CacheScope, Tenant
from icehouse_server.engine.core.block_log import BlockLog, Came, Left, RootsKnown
from icehouse_server.errors import EventsExpired, EventsLost
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole
from icehouse_server.rpc.calls.wire import EncodedResponse
from icehouse_server.rpc.kv_events.block_mirror import (
    BlockImage,
    BlockRemoved,
    BlocksCleared,
    BlockStored,
    KvBatch,
    KvBlock,
    SnapshotChunk,
)
from icehouse_server.rpc.kv_events.kv_event_source import KvEventSource

from tests.fixtures.kv_event_source import source_of
from tests.fixtures.rpc.http2 import framed, peer_of
from tests.fixtures.rpc.worker import worker_parts
from tests.unit.rpc.conftest import running

pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto comes with the extra fleet")

from icehouse_server.rpc.worker.kv_event_streams import (
    BEGINNING_BURST_COUNT,
    EventReader,
    KvEventStreams,
    batch_proto,
)
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from tests.fixtures.patience import BOUND_S

PATH = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
OWN, OTHER = Tenant(""), Tenant("other")
UNPROVED_READER = EventReader(OWN, sees_all_tokens=True)
ROOTS = {OWN: BlockHash(b"o" * 32), OTHER: BlockHash(b"p" * 32)}
FIRST = KvBlock(-5, None, pack_tokens([1, 2, 3, 4]), CacheScope(OTHER, AdapterName("formal")))
SECOND = KvBlock(6, -5, pack_tokens([5, 6, 7, 8]), CacheScope())


def load(**changes: Any) -> worker.SchedulerLoad:
    return worker.SchedulerLoad(
        **{"num_running_reqs": 2, "token_usage": 0.5, "cache_hit_rate": 0.9, "num_used_tokens": 7, **changes}
    )


def test_an_event_is_told_with_its_place() -> None:
    events = (
        BlocksCleared(),
        BlockStored(FIRST, Tier.SSD),
        BlockStored(SECOND, Tier.RAM),
        BlockRemoved(6, Tier.RAM, OWN),
    )
    cleared, first, second, removed = batch_proto(KvBatch(9, 1.5, events), UNPROVED_READER).events
    assert cleared.WhichOneof("data") == "cleared"
    assert first.stored == common.KvBlocksStored(
        blocks=[common.KvBlock(block_hash=-5, token_ids=[1, 2, 3, 4], block_size=4)],
        tier=common.KV_CACHE_TIER_HOST,
        medium="CPU",
        locality=common.KV_CACHE_LOCALITY_LOCAL,
        lora_name="formal",
        cache_salt="other",
    )
    assert (second.stored.parent_block_hash, second.stored.tier) == (-5, common.KV_CACHE_TIER_DEVICE)
    assert not second.stored.HasField("cache_salt") and not second.stored.HasField("lora_name")
    assert removed.removed == common.KvBlocksRemoved(
        block_hashes=[6], tier=common.KV_CACHE_TIER_DEVICE, medium="GPU"
    )


def test_a_block_with_images_names_them_beside_its_tokens() -> None:
    images = (BlockImage("ca" * 32, -3), BlockImage("d0" * 32, 2))
    batch = KvBatch(9, 1.5, (BlockStored(dataclasses.replace(SECOND, images=images), Tier.RAM),))
    (block,) = batch_proto(batch, UNPROVED_READER).events[0].stored.blocks
    assert [(key.multimodal.identifier, key.multimodal.offset) for key in block.extra_keys] == list(images)
    assert not FIRST.images and not batch_proto(batch, UNPROVED_READER).events[0].stored.HasField(
        "cache_salt"
    )


def test_what_is_not_the_subscribers_own_has_a_salt() -> None:
    batch = KvBatch(9, 1.5, (BlockStored(FIRST, Tier.RAM), BlockStored(SECOND, Tier.RAM)))
    readers = {own: EventReader(own, sees_all_tokens=True) for own in (OWN, OTHER)}
    salts = {
        own: [e.stored.cache_salt for e in batch_proto(batch, reader).events]
        for own, reader in readers.items()
    }
    assert salts[OWN] == ["other", ""] and salts[OTHER][0] == "" and salts[OTHER][1] != ""


def test_of_blocks_that_are_not_the_readers_own_the_hashes_are_told() -> None:
    images = (BlockImage("ca" * 32, -3),)
    foreign = dataclasses.replace(FIRST, images=images)
    batch = KvBatch(9, 1.5, (BlockStored(foreign, Tier.RAM), BlockStored(SECOND, Tier.RAM)))
    first, second = (
        event.stored for event in batch_proto(batch, EventReader(OWN, sees_all_tokens=False)).events
    )
    assert first == common.KvBlocksStored(
        blocks=[common.KvBlock(block_hash=-5, block_size=4)],
        tier=common.KV_CACHE_TIER_DEVICE,
        medium="GPU",
        locality=common.KV_CACHE_LOCALITY_LOCAL,
        lora_name="formal",
        cache_salt="other",
    )
    assert list(second.blocks[0].token_ids) == [5, 6, 7, 8]


def test_a_part_of_a_snapshot_says_which() -> None:
    batch = KvBatch(9, 1.5, (BlocksCleared(),), SnapshotChunk(1, 3, 40))
    message = batch_proto(batch, UNPROVED_READER)
    assert (message.sequence_number, message.timestamp) == (9, 1.5)
    assert message.snapshot == common.KvSnapshotChunk(index=1, count=3, blocks=40)


class Stream:
    """A subscription, and the source that it reads."""

    def __init__(
        self,
        source: KvEventSource,
        caller: Caller = UNPROVED,
        *,
        after_number: int = 0,
        streams: KvEventStreams | None = None,
    ) -> None:
        request = common.SubscribeKvEventsRequest(start_sequence_number=after_number)
        self.batches = (streams or KvEventStreams(source)).subscribe(request, caller, load)

    async def next(self) -> common.KvEventBatch:
        async with asyncio.timeout(BOUND_S):
            return read(await anext(self.batches))


def read(message: EncodedResponse) -> common.KvEventBatch:
    return common.KvEventBatch.FromString(message.data)


def block(number: int, tenant: Tenant = OWN) -> Came:
    name = BlockHash(number.to_bytes(8, "big") * 4)
    return Came(Tier.RAM, name, ROOTS[tenant], True, 4, (number,) * 4)


@pytest.fixture
async def source() -> AsyncIterator[KvEventSource]:
    made = source_of(BlockLog(), block_token_count=4)
    tell(made, RootsKnown(tuple((root, CacheScope(tenant)) for tenant, root in ROOTS.items())))
    yield made


def tell(source: KvEventSource, *changes: Any) -> None:
    source.feed.publish(source.mirror.apply(changes))


async def test_a_subscriber_gets_the_state_then_what_changes(source: KvEventSource) -> None:
    tell(source, block(1), block(2, OTHER))
    stream = Stream(source)
    state = await stream.next()
    assert state.snapshot.blocks == 2 and len(state.events) == 3 and state.load.sample == 1
    assert not state.load.load_only
    tell(source, Left(Tier.RAM, block(1).name))
    change = await stream.next()
    assert change.sequence_number == state.sequence_number + 1
    assert change.events[0].removed.block_hashes == [1] and not change.HasField("snapshot")
    await stream.batches.aclose()


async def test_a_silent_server_is_heard_of_by_its_load(source: KvEventSource) -> None:
    stream = Stream(source)
    state = await stream.next()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    source.clock.now += 2.0  # type: ignore[attr-defined]
    heartbeat = await waiting
    assert heartbeat.load.load_only and not heartbeat.events
    assert heartbeat.sequence_number == state.sequence_number
    await stream.batches.aclose()


async def test_a_tenant_is_told_of_its_own_alone(source: KvEventSource) -> None:
    tell(source, block(1), block(2, OTHER))
    stream = Stream(source, Caller(OTHER, CallerRole.TENANT))
    state = await stream.next()
    assert [e.stored.blocks[0].block_hash for e in state.events if e.HasField("stored")] == [2]
    tell(source, block(3))
    tell(source, block(4, OTHER))
    change = await stream.next()
    assert [e.stored.blocks[0].block_hash for e in change.events] == [4]
    assert change.sequence_number == state.sequence_number + 1
    await stream.batches.aclose()


@pytest.mark.parametrize(
    ("caller", "operators_see_tokens", "seen"),
    [
        (UNPROVED, False, {1: [1] * 4, 2: [2] * 4}),
        (Caller(OTHER, CallerRole.TENANT), False, {2: [2] * 4}),
        (Caller(OTHER, CallerRole.OPERATOR), False, {1: [], 2: [2] * 4}),
        (Caller(Tenant("third"), CallerRole.OPERATOR), False, {1: [], 2: []}),
        (Caller(Tenant("third"), CallerRole.OPERATOR), True, {1: [1] * 4, 2: [2] * 4}),
    ],
)
async def test_operators_see_others_tokens_only_where_a_setting_says_so(
    source: KvEventSource, caller: Caller, operators_see_tokens: bool, seen: dict[int, list[int]]
) -> None:
    tell(source, block(1), block(2, OTHER))
    streams = KvEventStreams(source, operators_see_tokens=operators_see_tokens)
    stream = Stream(source, caller, streams=streams)

    def tokens(batch: common.KvEventBatch) -> dict[int, list[int]]:
        blocks = [block for event in batch.events for block in event.stored.blocks]
        return {block.block_hash: list(block.token_ids) for block in blocks}

    assert tokens(await stream.next()) == seen
    # As they happen, as in the state.
    tell(source, *(Left(Tier.RAM, block(number).name) for number in (1, 2)), block(1), block(2, OTHER))
    assert tokens(await stream.next()) == seen
    await stream.batches.aclose()


async def test_events_are_encoded_once_for_all_who_are_told_the_same(source: KvEventSource) -> None:
    tell(source, block(1), block(2, OTHER))
    streams = KvEventStreams(source)
    readers = [Stream(source, UNPROVED, streams=streams) for _ in range(3)]
    readers.append(Stream(source, Caller(OTHER, CallerRole.OPERATOR), streams=streams))
    for _ in range(2):
        for each in readers:
            await each.next()
        tell(source, Left(Tier.RAM, block(1).name))
    assert streams.encoded_total == 2 * 2, "states and changes, of two kinds of readers"
    for each in readers:
        await each.batches.aclose()


async def test_a_number_of_another_life_is_out_of_range_before_there_is_a_stream(
    source: KvEventSource,
) -> None:
    with pytest.raises(EventsExpired):
        Stream(source, after_number=7)


async def test_a_gateway_that_is_out_of_range_gets_no_headers_first(source: KvEventSource) -> None:
    # Behind headers SMG takes the refusal for a broken stream, and comes back with the same number for ever.
    parts = worker_parts(kv_events=KvEventStreams(source))
    async with running(worker=parts) as served, peer_of(served.server.address) as peer:
        stream = await peer.open_call(PATH)
        request = common.SubscribeKvEventsRequest(start_sequence_number=7)
        await peer.send(stream, framed(request.SerializeToString()), end=True)
        code, _ = await peer.status(stream)
        assert code == grpc.StatusCode.OUT_OF_RANGE.value[0]
        assert sum(isinstance(frame, HeadersFrame) for frame in peer.frames) == 1


async def test_a_subscriber_that_was_overtaken_is_told(source: KvEventSource) -> None:
    stream = Stream(source)
    await stream.next()
    source.feed._replay_limit_bytes = 1_000
    for number in range(50):
        tell(source, block(number))
    with pytest.raises(EventsLost):
        await stream.next()


@pytest.mark.parametrize("resumes", [False, True])
async def test_who_comes_again_all_the_time_waits_for_its_turn(source: KvEventSource, resumes: bool) -> None:
    delays: list[float] = []

    async def note(delay_s: float) -> None:
        delays.append(delay_s)

    tell(source, block(1))
    tell(source, block(2))
    number = source.feed.channel_of(None).last_number - 1 if resumes else 0
    streams = KvEventStreams(source, sleep=note)
    for _ in range(BEGINNING_BURST_COUNT + 3):
        request = common.SubscribeKvEventsRequest(start_sequence_number=number)
        batches = streams.subscribe(request, UNPROVED, load)
        assert read(await anext(batches)).events
        await batches.aclose()
    assert delays == [*([0.0] * BEGINNING_BURST_COUNT), 0.25, 0.5, 0.75]


async def test_a_number_that_is_refused_is_a_turn_too(source: KvEventSource) -> None:
    delays: list[float] = []

    async def note(delay_s: float) -> None:
        delays.append(delay_s)

    streams = KvEventStreams(source, sleep=note)
    for _ in range(BEGINNING_BURST_COUNT):
        with pytest.raises(EventsExpired):
            streams.subscribe(common.SubscribeKvEventsRequest(start_sequence_number=7), UNPROVED, load)
    batches = streams.subscribe(common.SubscribeKvEventsRequest(), UNPROVED, load)
    assert await anext(batches)
    await batches.aclose()
    assert delays == [0.25]


async def test_a_subscriber_that_takes_nothing_costs_the_others_nothing(source: KvEventSource) -> None:
    source.feed._replay_limit_bytes = 1_000
    parts = worker_parts(kv_events=KvEventStreams(source))
    async with (
        running(worker=parts) as served,
        peer_of(served.server.address, window_bytes=0) as peer,
    ):
        stalled = await peer.open_call(PATH)
        await peer.send(stalled, framed(common.SubscribeKvEventsRequest().SerializeToString()), end=True)
        await peer.until(lambda: stalled in peer.headers)
        call = served.worker.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        seen: list[int] = []
        for number in range(1, 200):
            tell(source, block(number))
            assert source.feed.ring_bytes <= 1_000
            while not seen or seen[-1] != number:
                batch = await call.read()
                seen += [event.stored.blocks[0].block_hash for event in batch.events if event.stored.blocks]
        assert seen == list(range(1, 200))
        call.cancel()


async def test_a_stream_ends_with_the_engine(source: KvEventSource) -> None:
    stream = Stream(source)
    await stream.next()
    source.left_ready.set()
    with pytest.raises(StopAsyncIteration):
        await stream.next()
