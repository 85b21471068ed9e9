"""Counters are counted once for all who ask at the same time, and never from before they asked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest
from icehouse.v1.server_service_pb2 import WatchStatsResponse
from icehouse_server.config import TenantConfig
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import GroupStats, RankState, RankStats, ReplyStats
from icehouse_server.errors import IcehouseError
from icehouse_server.rpc.access.caller import UNPROVED, Caller, CallerRole
from icehouse_server.rpc.access.tenants import Tenants
from icehouse_server.rpc.calls.watchers import ReadGroup, Telemetry
from icehouse_server.rpc.engine_client.engine_ports import ServedModel, StatsReply
from icehouse_server.rpc.engine_client.router import Router
from icehouse_server.rpc.services.observation import CallObservation

from tests.fixtures.rpc.fake_engine import MODEL_INFO, FakeEngine, FakeTokenizer
from tests.fixtures.rpc.seats import one_seat
from tests.unit.rpc.conftest import FakeClock


class CountedEngine(FakeEngine):
    """Counts how often it was asked."""

    asked_count = 0

    def request_stats(self, reply: StatsReply) -> None:
        self.asked_count += 1
        super().request_stats(reply)


@contextlib.asynccontextmanager
async def reading(
    *, group: ReadGroup | None = None
) -> AsyncIterator[tuple[CallObservation, CountedEngine, Router]]:
    clock = FakeClock()
    router = Router(asyncio.get_running_loop())
    engine = CountedEngine(router)
    router.model_loaded(ServedModel(MODEL_INFO, FakeTokenizer()))
    router.state_changed(EngineState.READY, None)
    await asyncio.sleep(0)
    tenants = Tenants(TenantConfig(), running_limit=0, clock=clock)
    yield (
        CallObservation(
            Telemetry(group=group),
            seats=one_seat(engine, router, clock),
            tenants=tenants,
            replies=lambda: ReplyStats(0, 0, 0),
            clock=clock,
        ),
        engine,
        router,
    )
    engine.close()


async def test_all_who_come_while_it_counts_get_the_next_answer_together() -> None:
    async with reading() as (reader, engine, _):
        go = threading.Event()
        engine.call_on_thread(go.wait)
        first = asyncio.ensure_future(reader.ask())
        while not engine.asked_count:
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(reader.ask()) for _ in range(50)]
        gone = others.pop()
        await asyncio.sleep(0)
        gone.cancel()
        go.set()
        await asyncio.gather(first, *others)
        assert engine.asked_count == 2
        # What was told before is told to nobody again.
        await reader.ask()
        assert engine.asked_count == 3


async def test_all_who_are_told_the_same_get_one_message() -> None:
    async with reading() as (reader, engine, _):
        blue, red = Caller(Tenant("blue"), CallerRole.TENANT), Caller(Tenant("red"), CallerRole.TENANT)
        callers = [UNPROVED, blue, UNPROVED, red, Caller(Tenant("boss"), CallerRole.OPERATOR), blue]
        for _ in range(2):
            asked_count = engine.asked_count
            told = await asyncio.gather(*(reader.answer(caller) for caller in callers))
            assert engine.asked_count == asked_count + 1
            assert told[0] is told[2] is told[4] and told[1] is told[5]
            assert len({id(each) for each in told}) == 3
            [whole, own] = [WatchStatsResponse.FromString(told[n].data).stats for n in (0, 1)]
            assert whole.HasField("engine") and not own.HasField("engine")
        assert (await reader.answer(UNPROVED)).data is not told[0].data, "what was told before is over"


async def test_a_group_is_shown_to_operators_alone_and_only_where_there_is_one() -> None:
    ranks = GroupStats(1, (RankStats(0, "a", RankState.READY),))
    tenant, operator = (Caller(Tenant("blue"), role) for role in (CallerRole.TENANT, CallerRole.OPERATOR))
    for group in (lambda engine, cache: ranks, None):
        async with reading(group=group) as (reader, _, _):
            own, whole = [
                WatchStatsResponse.FromString((await reader.answer(caller)).data).stats
                for caller in (tenant, operator)
            ]
            assert not own.HasField("group")
            assert whole.HasField("group") == (group is not None)
            assert [rank.host for rank in whole.group.ranks] == (["a"] if group is not None else [])


async def test_an_engine_that_ends_tells_all_of_them() -> None:
    async with reading() as (reader, engine, router):
        engine.answers_stats = False
        asking = [asyncio.ensure_future(reader.ask()) for _ in range(3)]
        while not engine.asked_count:
            await asyncio.sleep(0)
        router.state_changed(EngineState.FAILED, None)
        for each in asking:
            with pytest.raises(IcehouseError):
                await each


async def test_an_answer_that_never_comes_keeps_nobody_for_ever() -> None:
    async with reading() as (reader, engine, _):
        engine.answers_stats = False
        lost = asyncio.ensure_future(reader.ask())
        while not engine.asked_count:
            await asyncio.sleep(0)
        engine.answers_stats = True
        await asyncio.wait_for(reader.ask(), 30)
        lost.cancel()
