"""A load is looked at once a tick for all who subscribed to it, and wakes them only when it has changed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import pytest
from icehouse_server.domain.ids import Tenant
from icehouse_server.engine.core.block_log import BlockLog

from tests.fixtures.kv_event_source import source_of

pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto comes with the extra fleet")

from icehouse_server.rpc.worker.kv_event_streams import HEARTBEAT_S, LoadRecords, LoadWatches
from smg_grpc_proto.generated import vllm_engine_pb2 as worker

ADS = Tenant("ads")


def load(**changes: Any) -> worker.SchedulerLoad:
    return worker.SchedulerLoad(
        **{"num_running_reqs": 2, "token_usage": 0.5, "cache_hit_rate": 0.9, "num_used_tokens": 7, **changes}
    )


class Loads:
    """Of all and of one tenant; counts how often each is read."""

    def __init__(self) -> None:
        self.now = {None: load(), ADS: load()}
        self.read_count = {None: 0, ADS: 0}

    def read(self, scope: Tenant | None) -> worker.SchedulerLoad:
        self.read_count[scope] += 1
        return worker.SchedulerLoad.FromString(self.now[scope].SerializeToString())


async def test_a_hundred_subscribers_have_the_load_read_once_a_tick() -> None:
    loads, watches = Loads(), LoadWatches(source_of(BlockLog(), block_token_count=4))
    with contextlib.ExitStack() as stack:
        for number in range(100):
            scope = ADS if number % 2 else None
            stack.enter_context(watches.watching(scope, functools.partial(loads.read, scope)))
        before = dict(loads.read_count)
        watches.tick()
        assert before == {None: 1, ADS: 1} and loads.read_count == {None: 2, ADS: 2}
    watches.tick()
    assert loads.read_count == {None: 2, ADS: 2}, "nobody is there any more"


async def test_who_has_nothing_to_say_is_woken_by_the_heartbeat_alone() -> None:
    source = source_of(BlockLog(), block_token_count=4)
    loads, watches = Loads(), LoadWatches(source)
    woken: list[Tenant | None] = []

    async def wait(scope: Tenant | None) -> None:
        while True:
            await source.feed.channel_of(scope).wait()
            woken.append(scope)

    async def tick() -> list[Tenant | None]:
        woken.clear()
        watches.tick()
        for _ in range(3):
            await asyncio.sleep(0)
        return list(woken)

    with (
        watches.watching(None, functools.partial(loads.read, None)),
        watches.watching(ADS, functools.partial(loads.read, ADS)),
    ):
        tasks = [asyncio.ensure_future(wait(scope)) for scope in (None, ADS)]
        await asyncio.sleep(0)
        assert await tick() == [None, ADS], "the first beat"
        assert await tick() == []
        loads.now[ADS] = load(num_waiting_reqs=1)
        assert await tick() == [ADS]
        assert await tick() == []
        source.clock.now += HEARTBEAT_S  # type: ignore[attr-defined]
        assert await tick() == [None, ADS]
        source.left_ready.set()
        assert await tick() == [None, ADS] == await tick()
        for task in tasks:
            task.cancel()


def test_load_records_are_numbered_and_whole_where_they_stand_alone() -> None:
    now = [load()]
    records = LoadRecords(lambda: now[0])
    first, second = records.beside_events(), records.beside_events()
    assert (first.sample, second.sample) == (1, 2)
    assert (second.running_requests, second.token_usage, second.active_token_usage) == (2, 0.5, 0.5)
    assert first.HasField("cache_hit_rate") and not second.HasField("cache_hit_rate")
    assert records.alone(is_due=False) is None
    now[0] = load(num_waiting_reqs=1)
    changed = records.alone(is_due=False)
    assert changed is not None and changed.load_only and changed.waiting_requests == 1
    assert changed.HasField("num_used_tokens") and records.alone(is_due=False) is None
    heartbeat = records.alone(is_due=True)
    assert heartbeat is not None and heartbeat.sample == 4
