"""KV event batches as gateways read them: an event's message, its subscriber's load record, heartbeats.

A subscriber is told of its own tenant's blocks, an operator of all. Token ids are prompts in another form, so
an operator is told those of its own tenant's blocks, and of the others' the hashes, unless a setting says
that it is to see all. Gateways name no tenant in their requests, so what is the subscriber's own is told
without a salt, and matches them; another tenant's has its name for a salt, and matches nothing. Blocks on SSD
are told as those of the host's memory: gateways count on nothing further away, and these are restored without
being computed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable

from smg_grpc_proto.generated import common_pb2 as common

from icehouse_server.domain.blocks import unpack_tokens
from icehouse_server.domain.ids import DEFAULT_TENANT, Tenant
from icehouse_server.engine.core.block_log import KvTier
from icehouse_server.rpc.access import caller as callers
from icehouse_server.rpc.access.caller import Caller
from icehouse_server.rpc.calls.pace import Pace
from icehouse_server.rpc.calls.wire import Encoded
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
_KEPT_COUNT = 16
"""Batches whose messages are kept for the next subscriber that comes to them, of some 100 kB at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Who reads batches, as far as it makes a difference."""

    own: Tenant
    sees_all_tokens: bool
    """Those of other tenants' blocks too."""
    scope: Tenant | None = None
    """The tenant whose batches they are, None for all."""


class KvEventStreams:
    """One subscription after another over one source. Event loop."""

    def __init__(
        self,
        source: KvEventSource,
        *,
        operators_see_tokens: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._source = source
        self.operators_see_tokens = operators_see_tokens
        self._kept: collections.OrderedDict[object, bytes] = collections.OrderedDict()
        """Messages of batches without a load, the latest read last."""
        self.encoded_total = 0
        """Batches that were encoded, for whomever they were."""
        self._sleep = sleep
        self._watches = LoadWatches(source)
        self._pace = Pace(rate_per_s=BEGINNINGS_PER_S, burst_count=BEGINNING_BURST_COUNT)

    def subscribe(
        self, request: common.SubscribeKvEventsRequest, caller: Caller, load: Load
    ) -> AsyncGenerator[Encoded, None]:
        """Return the batches until the engine is READY no longer; raises EventsExpired, and they EventsLost.

        The first at once, before anything is sent: a gateway that has the headers takes itself for
        subscribed, and whatever but DATA_LOSS ends that stream, it comes back with the same number.
        """
        reader = Reader(
            own=DEFAULT_TENANT if caller.tenant is None else caller.tenant,
            sees_all_tokens=caller.tenant is None or self.operators_see_tokens,
            scope=caller.scope,
        )
        self._source.follow(reader.own)
        now = self._source.clock.monotonic()
        delay_s = self._pace.delay_s(callers.origin.get(), now=now, longest_s=_LONGEST_S)
        number = request.start_sequence_number
        subscription = self._source.subscribe(after_number=number, tenant=caller.scope)
        watching = self._watches.watching(caller.scope, load)
        return self._batches(subscription, reader, watching, number=number, delay_s=delay_s)

    async def _batches(
        self,
        subscription: Subscription,
        reader: Reader,
        watching: contextlib.AbstractContextManager[LoadWatch],
        *,
        number: int,
        delay_s: float,
    ) -> AsyncGenerator[Encoded, None]:
        source = self._source
        await self._sleep(delay_s)
        with watching as watch:
            records = LoadRecords(lambda: watch.load)
            spoken_time = source.clock.monotonic()
            while not source.left_ready.is_set():
                batch = subscription.take()
                if batch is not None:
                    number = batch.sequence_number
                    yield self._encoded(batch, reader, records.beside_events())
                else:
                    is_due = source.clock.monotonic() - spoken_time >= HEARTBEAT_S
                    heartbeat = records.alone(is_due=is_due)
                    if heartbeat is None:
                        await subscription.wait()
                        continue
                    message = common.KvEventBatch(
                        sequence_number=number, timestamp=source.clock.wall(), load=heartbeat
                    )
                    yield Encoded(message.SerializeToString())
                spoken_time = source.clock.monotonic()

    def _encoded(self, batch: KvBatch, reader: Reader, load: common.EngineLoad) -> Encoded:
        """Return a batch with the load beside it; what all who read it are told alike is encoded once."""
        key = (reader, batch.sequence_number, batch.snapshot)
        data = self._kept.pop(key, None)
        if data is None:
            data = batch_proto(batch, reader).SerializeToString()
            self.encoded_total += 1
            if len(self._kept) >= _KEPT_COUNT:
                self._kept.popitem(last=False)
        self._kept[key] = data
        # Fields of one message, one behind the other, are that message.
        return Encoded(data + common.KvEventBatch(load=load).SerializeToString())


def batch_proto(batch: KvBatch, reader: Reader) -> common.KvEventBatch:
    """Return a batch as its reader is told it, without the load."""
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


def _event_proto(event: KvEvent, reader: Reader) -> common.KvCacheEvent:
    if isinstance(event, BlockStored):
        return common.KvCacheEvent(stored=_stored_proto(event, reader))
    if isinstance(event, BlockRemoved):
        tier, medium = _TIERS[event.tier]
        removed = common.KvBlocksRemoved(block_hashes=[event.hash], tier=tier, medium=medium)
        return common.KvCacheEvent(removed=removed)
    return common.KvCacheEvent(cleared=common.KvCacheCleared())


def _stored_proto(event: BlockStored, reader: Reader) -> common.KvBlocksStored:
    block, (tier, medium) = event.block, _TIERS[event.tier]
    told = common.KvBlock(block_hash=block.hash, block_size=block.token_count)
    if reader.sees_all_tokens or block.scope.tenant == reader.own:
        told.token_ids.extend(unpack_tokens(block.packed_token_ids))
        for image in block.images:
            told.extra_keys.add(multimodal=common.KvMultimodalKey(**image._asdict()))
    stored = common.KvBlocksStored(
        blocks=[told], tier=tier, medium=medium, locality=common.KV_CACHE_LOCALITY_LOCAL
    )
    if block.parent is not None:
        stored.parent_block_hash = block.parent
    if block.scope.adapter:
        stored.lora_name = block.scope.adapter
    if block.scope.tenant != reader.own:
        stored.cache_salt = block.scope.tenant or _DEFAULT_SALT
    return stored
