"""KV event batches as gateways read them: an event's message, its subscriber's load record, heartbeats.

A subscriber is told of its own tenant's blocks, an operator of all. Gateways name no tenant in their
requests, so what is the subscriber's own is told without a salt, and matches them; another tenant's has its
name for a salt, and matches nothing. Blocks on SSD are told as those of the host's memory: gateways count on
nothing further away, and these are restored without being computed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

from icehouse_server.domain.blocks import unpack_tokens
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.engine.core.block_log import KvTier
from icehouse_server.rpc.access.caller import Caller, Role
from icehouse_server.rpc.kv_events.channel import Subscription
from icehouse_server.rpc.kv_events.events import BlockRemoved, BlockStored, KvBatch, KvEvent
from icehouse_server.rpc.kv_events.source import KvEventSource

TICK_S = 0.1
"""How often the load is looked at while there are no events."""
HEARTBEAT_S = 1.0
"""A subscriber hears something at least so often."""

_TIERS = {
    KvTier.RAM: (common.KV_CACHE_TIER_DEVICE, "GPU"),
    KvTier.SSD: (common.KV_CACHE_TIER_HOST, "CPU"),
}

_DEFAULT_SALT = "(default)"
"""Of the default tenant's blocks, to another one's operator."""

Load = Callable[[], worker.SchedulerLoad]


class KvEventStreams:
    """One subscription after another over one source. Event loop."""

    def __init__(self, source: KvEventSource) -> None:
        self._source = source

    def subscribe(
        self, request: common.SubscribeKvEventsRequest, caller: Caller, load: Load
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        """Return the batches until the engine is READY no longer; raises EventsExpired, and they EventsLost.

        The first at once, before anything is sent: a gateway that has the headers takes itself for
        subscribed, and whatever but DATA_LOSS ends that stream, it comes back with the same number.
        """
        own = DEFAULT_TENANT if caller.tenant is None else caller.tenant
        self._source.follow(own)
        number = request.start_sequence_number
        subscription = self._source.subscribe(
            after_number=number, tenant=None if caller.role is Role.OPERATOR else own
        )
        return self._batches(subscription, own, LoadRecords(load), number)

    async def _batches(
        self, subscription: Subscription, own: Tenant, records: LoadRecords, number: int
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        source = self._source
        spoken_time = source.clock.monotonic()
        while not source.left_ready.is_set():
            batch = await subscription.next(timeout_s=TICK_S)
            if batch is not None:
                number = batch.sequence_number
                yield batch_proto(batch, own, load=records.beside_events())
            else:
                is_due = source.clock.monotonic() - spoken_time >= HEARTBEAT_S
                heartbeat = records.alone(is_due=is_due)
                if heartbeat is None:
                    continue
                yield common.KvEventBatch(
                    sequence_number=number, timestamp=source.clock.wall(), load=heartbeat
                )
            spoken_time = source.clock.monotonic()


class LoadRecords:
    """Of one stream, numbered: all there is at first and by themselves, beside events what routing needs."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._sample = 0
        self._last = b""

    def beside_events(self) -> common.EngineLoad:
        """Return the record for a batch of events."""
        return self._numbered(self._load(), is_whole=not self._sample)

    def alone(self, *, is_due: bool) -> common.EngineLoad | None:
        """Return a record for a batch without events; None where nothing has changed and none is due."""
        load = self._load()
        if not is_due and load.SerializeToString(deterministic=True) == self._last:
            return None
        record = self._numbered(load, is_whole=True)
        record.load_only = True
        return record

    def _numbered(self, load: worker.SchedulerLoad, *, is_whole: bool) -> common.EngineLoad:
        self._sample += 1
        self._last = load.SerializeToString(deterministic=True)
        record = common.EngineLoad(
            running_requests=load.num_running_reqs,
            waiting_requests=load.num_waiting_reqs,
            waiting_uncached_tokens=load.num_waiting_uncached_tokens,
            token_usage=load.token_usage,
            # Cached blocks give way to requests, so all that is counted is in use.
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


def batch_proto(batch: KvBatch, own: Tenant, *, load: common.EngineLoad | None = None) -> common.KvEventBatch:
    """Return a batch as a subscriber of this tenant reads it."""
    message = common.KvEventBatch(
        sequence_number=batch.sequence_number,
        timestamp=batch.time,
        events=[_event_proto(event, own) for event in batch.events],
        load=load,
    )
    if batch.snapshot is not None:
        message.snapshot.index = batch.snapshot.index
        message.snapshot.count = batch.snapshot.chunk_count
        message.snapshot.blocks = batch.snapshot.stored_count
    return message


def _event_proto(event: KvEvent, own: Tenant) -> common.KvCacheEvent:
    if isinstance(event, BlockStored):
        return common.KvCacheEvent(stored=_stored_proto(event, own))
    if isinstance(event, BlockRemoved):
        tier, medium = _TIERS[event.tier]
        removed = common.KvBlocksRemoved(block_hashes=[event.hash], tier=tier, medium=medium)
        return common.KvCacheEvent(removed=removed)
    return common.KvCacheEvent(cleared=common.KvCacheCleared())


def _stored_proto(event: BlockStored, own: Tenant) -> common.KvBlocksStored:
    block, (tier, medium) = event.block, _TIERS[event.tier]
    stored = common.KvBlocksStored(
        blocks=[
            common.KvBlock(
                block_hash=block.hash,
                token_ids=unpack_tokens(block.packed_token_ids),
                block_size=block.token_count,
            )
        ],
        tier=tier,
        medium=medium,
        locality=common.KV_CACHE_LOCALITY_LOCAL,
    )
    if block.parent is not None:
        stored.parent_block_hash = block.parent
    if block.scope.adapter:
        stored.lora_name = block.scope.adapter
    if block.scope.tenant != own:
        stored.cache_salt = block.scope.tenant or _DEFAULT_SALT
    return stored
