"""Load records: one is read for all who subscribed, again after half a tick, and sent when it has changed."""

from __future__ import annotations

from typing import Any

import pytest
from icehouse_server.engine.core.block_log import BlockLog
from icehouse_server.rpc.access.caller import UNPROVED

from tests.fixtures.kv_event_source import source_of

pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto comes with the extra fleet")

from icehouse_server.rpc.worker.kv_event_streams import TICK_S, KvEventStreams, LoadRecords
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as worker


def load(**changes: Any) -> worker.SchedulerLoad:
    return worker.SchedulerLoad(
        **{"num_running_reqs": 2, "token_usage": 0.5, "cache_hit_rate": 0.9, "num_used_tokens": 7, **changes}
    )


async def test_many_subscribers_share_a_load_for_half_a_tick() -> None:
    source = source_of(BlockLog(), block_token_count=4)
    read_count = 0

    def read() -> worker.SchedulerLoad:
        nonlocal read_count
        read_count += 1
        return load()

    async def no_delay(delay_s: float) -> None:
        pass

    streams = KvEventStreams(source, sleep=no_delay)
    for tick in (1, 2):
        for _ in range(10):
            batches = streams.subscribe(common.SubscribeKvEventsRequest(), UNPROVED, read)
            assert await anext(batches)
            await batches.aclose()
        assert read_count == tick
        source.clock.now += TICK_S  # type: ignore[attr-defined]


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
