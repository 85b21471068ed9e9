"""KV event batches as gateways read them: an event's message, its subscriber's load record, heartbeats.

A subscriber is told of its own tenant's blocks, an operator of all. Gateways name no tenant in their
requests, so what is the subscriber's own is told without a salt, and matches them; another tenant's has its
name for a salt, and matches nothing. Blocks on SSD are told as those of the host's memory: gateways count on
nothing further away, and these are restored without being computed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from smg_grpc_proto.generated import common_pb2 as common

from icehouse_server.domain.blocks import unpack_tokens
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.engine.core.block_log import KvTier
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.calls.pace import Pace
from icehouse_server.rpc.kv_events.channel import Subscription
from icehouse_server.rpc.kv_events.events import BlockRemoved, BlockStored, KvBatch, KvEvent
from icehouse_server.rpc.kv_events.source import KvEventSource
from icehouse_server.rpc.worker.load_watch import HEARTBEAT_S, Load, LoadRecords, LoadWatch, LoadWatches

BEGINNINGS_PER_S = 4.0
"""How often one caller may subscribe, from 0 or from a number: either has blocks encoded for it again."""
BEGINNING_BURST_COUNT = 8
_LONGEST_S = 30.0

_TIERS = {
    KvTier.RAM: (common.KV_CACHE_TIER_DEVICE, "GPU"),
    KvTier.SSD: (common.KV_CACHE_TIER_HOST, "CPU"),
}

_DEFAULT_SALT = "(default)"
"""Of the default tenant's blocks, to another one's operator."""


class KvEventStreams:
    """One subscription after another over one source. Event loop."""

    def __init__(
        self, source: KvEventSource, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._source = source
        self._sleep = sleep
        self._watches = LoadWatches(source)
        self._pace = Pace(rate_per_s=BEGINNINGS_PER_S, burst_count=BEGINNING_BURST_COUNT)

    def subscribe(
        self, request: common.SubscribeKvEventsRequest, caller: Caller, load: Load
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        """Return the batches until the engine is READY no longer; raises EventsExpired, and they EventsLost.

        The first at once, before anything is sent: a gateway that has the headers takes itself for
        subscribed, and whatever but DATA_LOSS ends that stream, it comes back with the same number.
        """
        own = DEFAULT_TENANT if caller.tenant is None else caller.tenant
        self._source.follow(own)
        now = self._source.clock.monotonic()
        delay_s = self._pace.delay_s(callers.origin.get(), now=now, longest_s=_LONGEST_S)
        number = request.start_sequence_number
        subscription = self._source.subscribe(after_number=number, tenant=caller.scope)
        watching = self._watches.watching(caller.scope, load)
        return self._batches(subscription, own, watching, number=number, delay_s=delay_s)

    async def _batches(
        self,
        subscription: Subscription,
        own: Tenant,
        watching: contextlib.AbstractContextManager[LoadWatch],
        *,
        number: int,
        delay_s: float,
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        source = self._source
        await self._sleep(delay_s)
        with watching as watch:
            records = LoadRecords(lambda: watch.load)
            spoken_time = source.clock.monotonic()
            while not source.left_ready.is_set():
                batch = subscription.take()
                if batch is not None:
                    number = batch.sequence_number
                    yield batch_proto(batch, own, load=records.beside_events())
                else:
                    is_due = source.clock.monotonic() - spoken_time >= HEARTBEAT_S
                    heartbeat = records.alone(is_due=is_due)
                    if heartbeat is None:
                        await subscription.wait()
                        continue
                    yield common.KvEventBatch(
                        sequence_number=number, timestamp=source.clock.wall(), load=heartbeat
                    )
                spoken_time = source.clock.monotonic()


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
                extra_keys=[
                    common.KvBlockExtraKey(multimodal=common.KvMultimodalKey(**image._asdict()))
                    for image in block.images
                ],
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
