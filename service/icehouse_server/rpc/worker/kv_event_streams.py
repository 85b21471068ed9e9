"""KV event batches in the form that gateways read: events, and how busy the server is.

A subscriber gets events of its own tenant's blocks, an operator of all. Token ids are prompts in another
form, so an operator gets them only for its own tenant's blocks, and hashes for others, unless a setting says
otherwise. Gateways name no tenant in their requests. So the subscriber's own blocks have no salt and match;
another tenant's have its name as salt and match nothing. Blocks on SSD are reported as blocks in host memory:
gateways ignore anything further away, although these need not be computed either.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import AsyncGenerator, Awaitable, Callable

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.domain.blocks import unpack_tokens
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.access.shares import RateLimit
from icehouse_server.rpc.calls.wire import EncodedResponse
from icehouse_server.rpc.kv_events.block_mirror import BlockRemoved, BlockStored, KvBatch, KvEvent
from icehouse_server.rpc.kv_events.event_feed import Subscription
from icehouse_server.rpc.kv_events.kv_event_source import KvEventSource

BEGINNINGS_PER_S = 4.0
"""How often one caller may subscribe, from 0 or from a number: either way blocks are encoded again."""
BEGINNING_BURST_COUNT = 8
_LONGEST_S = 30.0

_TIERS = {Tier.RAM: (common.KV_CACHE_TIER_DEVICE, "GPU"), Tier.SSD: (common.KV_CACHE_TIER_HOST, "CPU")}

_DEFAULT_SALT = "(default)"
"""Salt of the default tenant's blocks, for another tenant's operator."""
_ENCODED_COUNT_LIMIT = 16
"""Most encoded batches, each up to about 100 kB, that are kept for the next subscribers."""


@dataclasses.dataclass(frozen=True, slots=True)
class EventReader:
    """What the encoding of a batch depends on: who reads it."""

    own: Tenant
    sees_all_tokens: bool
    """Whether it gets the tokens of other tenants' blocks too."""
    scope: Tenant | None = None
    """The tenant whose batches it reads, None for all."""


class KvEventStreams:
    """The subscriptions to one source. Owned by the event loop."""

    def __init__(
        self,
        source: KvEventSource,
        *,
        operators_see_tokens: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self.operators_see_tokens = operators_see_tokens
        self._encoded_batches: collections.OrderedDict[object, bytes] = collections.OrderedDict()
        """Encoded batches without a load, the most recently read last."""
        self.encoded_total = 0
        """How many batches were encoded for all readers."""
        self._sleep = sleep
        self._loads: dict[Tenant | None, tuple[float, worker.SchedulerLoad]] = {}
        """For each tenant with subscribers (None for all): when its load was read, and the load."""
        self._rate_limit = RateLimit(rate_per_s=BEGINNINGS_PER_S, burst_count=BEGINNING_BURST_COUNT)

    def subscribe(
        self, request: common.SubscribeKvEventsRequest, caller: Caller, load: Load
    ) -> AsyncGenerator[EncodedResponse, None]:
        """Return the batches until the engine stops serving. Raises EventsExpired; the iterator raises
        EventsLost.

        EventsExpired is raised before anything is sent: a gateway that has the headers believes that it is
        subscribed, and unless the stream ends with DATA_LOSS, it returns with the same number.
        """
        reader = EventReader(
            own=DEFAULT_TENANT if caller.tenant is None else caller.tenant,
            sees_all_tokens=caller.tenant is None or self.operators_see_tokens,
            scope=caller.scope,
        )
        self._source.follow(reader.own)
        now = self._source.clock.monotonic()
        delay_s = self._rate_limit.delay_s(callers.origin.get(), now=now, longest_s=_LONGEST_S)
        number = request.start_sequence_number
        subscription = self._source.feed.subscribe(after_number=number, tenant=caller.scope)
        return self._batches(subscription, reader, load, number=number, delay_s=delay_s)

    async def _batches(
        self,
        subscription: Subscription,
        reader: EventReader,
        load: Load,
        *,
        number: int,
        delay_s: float,
    ) -> AsyncGenerator[EncodedResponse, None]:
        source = self._source
        await self._sleep(delay_s)
        records = LoadRecords(functools.partial(self._load_of, reader.scope, load))
        sent_time = source.clock.monotonic()
        while not source.left_ready.is_set():
            batch = subscription.take()
            if batch is not None:
                number = batch.sequence_number
                yield self._encoded(batch, reader, records.beside_events())
            else:
                is_due = source.clock.monotonic() - sent_time >= HEARTBEAT_S
                heartbeat = records.alone(is_due=is_due)
                if heartbeat is None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(TICK_S):
                            await subscription.wait()
                    continue
                message = common.KvEventBatch(
                    sequence_number=number, timestamp=source.clock.wall(), load=heartbeat
                )
                yield EncodedResponse(message.SerializeToString())
            sent_time = source.clock.monotonic()

    def _load_of(self, scope: Tenant | None, read: Load) -> worker.SchedulerLoad:
        """Return the load of a scope; all its subscribers share one reading for half a tick."""
        now = self._source.clock.monotonic()
        read_time, load = self._loads.get(scope, (-math.inf, None))
        if load is None or now - read_time >= TICK_S / 2:
            load = read()
            self._loads[scope] = (now, load)
        return load

    def _encoded(self, batch: KvBatch, reader: EventReader, load: common.EngineLoad) -> EncodedResponse:
        """Return a batch with the load; the batch is encoded once for all equal readers."""
        key = (reader, batch.sequence_number, batch.snapshot)
        data = self._encoded_batches.pop(key, None)
        if data is None:
            data = batch_proto(batch, reader).SerializeToString()
            self.encoded_total += 1
            if len(self._encoded_batches) >= _ENCODED_COUNT_LIMIT:
                self._encoded_batches.popitem(last=False)
        self._encoded_batches[key] = data
        # The encoded fields of one message may simply be concatenated.
        return EncodedResponse(data + common.KvEventBatch(load=load).SerializeToString())


def batch_proto(batch: KvBatch, reader: EventReader) -> common.KvEventBatch:
    """Return a batch for this reader, without the load."""
    message = common.KvEventBatch(
        sequence_number=batch.sequence_number,
        timestamp=batch.time,
        events=[_event_proto(event, reader) for event in batch.events],
    )
    if batch.snapshot is not None:
        message.snapshot.index = batch.snapshot.index
        message.snapshot.count = batch.snapshot.chunk_count
        message.snapshot.blocks = batch.snapshot.stored_count
    return message


def _event_proto(event: KvEvent, reader: EventReader) -> common.KvCacheEvent:
    if isinstance(event, BlockStored):
        return common.KvCacheEvent(stored=_stored_proto(event, reader))
    if isinstance(event, BlockRemoved):
        tier, medium = _TIERS[event.tier]
        removed = common.KvBlocksRemoved(block_hashes=[event.hash], tier=tier, medium=medium)
        return common.KvCacheEvent(removed=removed)
    return common.KvCacheEvent(cleared=common.KvCacheCleared())


def _stored_proto(event: BlockStored, reader: EventReader) -> common.KvBlocksStored:
    block, (tier, medium) = event.block, _TIERS[event.tier]
    proto_block = common.KvBlock(block_hash=block.hash, block_size=block.token_count)
    if reader.sees_all_tokens or block.scope.tenant == reader.own:
        proto_block.token_ids.extend(unpack_tokens(block.packed_token_ids))
        for image in block.images:
            proto_block.extra_keys.add(multimodal=common.KvMultimodalKey(**image._asdict()))
    stored = common.KvBlocksStored(
        blocks=[proto_block], tier=tier, medium=medium, locality=common.KV_CACHE_LOCALITY_LOCAL
    )
    if block.parent is not None:
        stored.parent_block_hash = block.parent
    if block.scope.adapter:
        stored.lora_name = block.scope.adapter
    if block.scope.tenant != reader.own:
        stored.cache_salt = block.scope.tenant or _DEFAULT_SALT
    return stored


TICK_S = 0.1
"""How often a silent stream checks its load."""
HEARTBEAT_S = 0.5
"""A stream that was silent for this long sends a heartbeat."""

Load = Callable[[], worker.SchedulerLoad]


class LoadRecords:
    """Numbered load records of one stream: complete ones alone and at the beginning, and otherwise the most
    important numbers beside events."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._sample = 0
        self._last: worker.SchedulerLoad | None = None

    def beside_events(self) -> common.EngineLoad:
        return self._numbered(self._load(), is_whole=not self._sample)

    def alone(self, *, is_due: bool) -> common.EngineLoad | None:
        """Return a record for a batch without events; None if nothing has changed and no heartbeat is due."""
        load = self._load()
        if not is_due and load == self._last:
            return None
        record = self._numbered(load, is_whole=True)
        record.load_only = True
        return record

    def _numbered(self, load: worker.SchedulerLoad, *, is_whole: bool) -> common.EngineLoad:
        self._sample += 1
        self._last = load
        record = common.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            # Cached blocks give way to requests, so only memory that requests use is counted.
            active_token_usage=load.token_usage,
            gen_throughput=load.gen_throughput,
            max_running_requests=load.max_running_requests,
            sample=self._sample,
        )
        if is_whole:
            record.cache_hit_rate = load.cache_hit_rate
            record.num_used_tokens = load.num_used_tokens
            record.max_total_num_tokens = load.max_total_num_tokens
        return record
