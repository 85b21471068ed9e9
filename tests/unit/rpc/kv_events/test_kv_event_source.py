"""The source asks the engine for nothing before somebody subscribes, and then for everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from icehouse_server.domain.cache_commands import BeginListing, ExportListing, Tier
from icehouse_server.domain.ids import DEFAULT_TENANT, BlockHash, CacheScope
from icehouse_server.engine.core.block_log import BlockLog, Came, ListingEnded
from icehouse_server.errors import IcehouseError, Reason
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.kv_events.block_mirror import BlockStored
from icehouse_server.rpc.kv_events.kv_event_source import KvEventSource

from tests.fixtures.kv_event_source import source_of
from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.fake_engine import FakeEngine

ROOT = BlockHash(b"r" * 32)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    made = FakeEngine(Router(asyncio.get_running_loop()))
    yield made
    made.close()


class ListingEngine:
    """Notes one block when it is asked for all, as the inference thread would."""

    def __init__(self, engine: FakeEngine, log: BlockLog) -> None:
        self.log = log
        log.add_roots({ROOT: CacheScope()})
        engine.order_answer = ExportListing(0)
        submit = engine.submit_command

        def note_and_submit(command: object, reply: object) -> None:
            if isinstance(command, BeginListing):
                log.begin()
                log.note(Came(Tier.RAM, BlockHash(b"a" * 32), ROOT, True, 4, (1, 2, 3, 4)))
                log.note(ListingEnded())
            submit(command, reply)  # type: ignore[arg-type]

        engine.submit_command = note_and_submit  # type: ignore[method-assign, assignment]


async def test_nothing_is_asked_before_somebody_subscribes(engine: FakeEngine) -> None:
    log = BlockLog()
    source = source_of(log, block_token_count=4, engine=engine)
    ListingEngine(engine, log)
    assert engine.orders == [] and not log.is_on
    source.follow(DEFAULT_TENANT)
    subscription = source.feed.subscribe(after_number=0, tenant=None)
    assert subscription.take() is not None, "the state as it is known comes at once"
    async with asyncio.timeout(BOUND_S):
        await subscription.wait()
    batch = subscription.take()
    assert batch is not None and isinstance(batch.events[0], BlockStored)
    stats = source.stats()
    assert (stats.block_count, stats.event_total, stats.lost_total, stats.untold_total) == (1, 1, 0, 0)
    assert stats.replay_bytes > 0
    assert len(engine.orders) == 1
    await source.stop()


async def test_without_a_cache_it_gives_up(engine: FakeEngine) -> None:
    engine.order_answer = IcehouseError(Reason.CACHE_UNSUPPORTED, "none")
    source = source_of(BlockLog(), block_token_count=4, engine=engine)
    source.follow(None)
    await ended(source)
    assert len(engine.orders) == 1
    await source.stop()


async def ended(source: KvEventSource) -> None:
    assert source._task is not None
    async with asyncio.timeout(BOUND_S):
        await source._task
