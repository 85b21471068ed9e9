"""Every counter of the house reaches the API under its own name."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from icehouse.v1 import (
    cache_policy_pb2,
    cache_service_pb2,
    cache_stats_pb2,
    engine_stats_pb2,
    server_service_pb2,
    usage_pb2,
)
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.domain import cache_stats
from icehouse_server.domain.cache_commands import Tier
from icehouse_server.domain.cache_stats import CacheStats, SpillDropCause
from icehouse_server.domain.events import FinishReason, ReuseLimit
from icehouse_server.domain.request import CacheUse
from icehouse_server.domain.stats import EngineStats
from icehouse_server.rpc.messages.proto_map import to_proto

from tests.unit.rpc.conftest import RunningServer
from tests.unit.rpc.messages.test_proto_map import filled

DERIVED = {"miss_token_total"}
"""Fields of the API that the house computes from others."""


def flat_domain(value: Any) -> list[float | str]:
    """Return all leaves, in declared order."""
    if dataclasses.is_dataclass(value):
        return [x for f in dataclasses.fields(value) for x in flat_domain(getattr(value, f.name))]
    if isinstance(value, tuple):
        return [x for item in value for x in flat_domain(item)]
    return [value.name if isinstance(value, enum.Enum) else value]


def flat_proto(message: Message) -> list[float | str]:
    """Return all leaves, in declared order, durations in seconds, enums by the end of their name."""
    leaves: list[float | str] = []
    for field in message.DESCRIPTOR.fields:
        if field.name in DERIVED:
            continue
        value = getattr(message, field.name)
        for item in value if field.is_repeated else [value]:
            if isinstance(item, Duration):
                leaves.append(item.ToNanoseconds() / 1e9)
            elif isinstance(item, Timestamp):
                leaves.append(item.ToMicroseconds() / 1e6)
            elif isinstance(item, Message):
                leaves += flat_proto(item)
            elif field.enum_type is not None:
                leaves.append(field.enum_type.values_by_number[item].name)
            else:
                leaves.append(item)
    return leaves


def same(domain: list[float | str], proto: list[float | str]) -> bool:
    """Compare leaf by leaf; an enum's API name ends with its name in the house."""
    assert len(domain) == len(proto)
    return all(
        str(p).endswith(str(d)) if isinstance(d, str) else d == p for d, p in zip(domain, proto, strict=True)
    )


def test_engine_counters_arrive_one_by_one() -> None:
    stats = filled(EngineStats, itertools.count(1))
    assert same(flat_domain(stats), flat_proto(to_proto(stats, engine_stats_pb2.EngineStats)))


def test_cache_counters_arrive_one_by_one() -> None:
    # Tenants have a message of their own, made of other counters too: see test_tenants.
    stats = dataclasses.replace(filled(CacheStats, itertools.count(1)), tenants=())
    assert same(flat_domain(stats), flat_proto(to_proto(stats, cache_stats_pb2.CacheStats)))


def test_missed_tokens_add_up() -> None:
    stats = filled(cache_stats.CacheStats, itertools.count(1))
    proto = to_proto(stats, cache_stats_pb2.CacheStats).lookups
    assert proto.miss_token_total == sum(miss.token_total for miss in proto.miss_tokens) > 0


async def test_a_server_without_cache_says_so(served: RunningServer) -> None:
    stats = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
    assert not stats.HasField("cache")
    assert stats.engine.step_total == 7
    response = await served.inference.CacheStats(messages.CacheStatsRequest())
    assert not response.HasField("cache")
    assert response.collect_time.ToSeconds() == stats.collect_time.ToSeconds() == int(served.clock.wall())


async def test_a_cache_without_ssd_says_so(served: RunningServer) -> None:
    served.engine.cache_stats = CacheStats(unsupported_detail="Mamba")
    cache = (await served.inference.CacheStats(messages.CacheStatsRequest())).cache
    assert cache.HasField("ram") and cache.unsupported_detail == "Mamba"
    assert not any(cache.HasField(name) for name in ("ssd", "disk", "last_reconcile"))


@pytest.mark.parametrize(
    ("our_enum", "api_enum", "prefix"),
    [
        (FinishReason, usage_pb2.FinishReason, "FINISH_REASON"),
        (ReuseLimit, usage_pb2.ReuseLimit, "REUSE_LIMIT"),
        (CacheUse, cache_policy_pb2.CacheUse, "CACHE_USE"),
        (Tier, cache_service_pb2.CacheTier, "CACHE_TIER"),
        (SpillDropCause, cache_stats_pb2.SpillDropCause, "SPILL_DROP_CAUSE"),
    ],
)
def test_enums_of_domain_and_api_are_the_same(our_enum: Any, api_enum: Any, prefix: str) -> None:
    names = set(api_enum.keys()) - {f"{prefix}_UNSPECIFIED"}
    assert {f"{prefix}_{member.name}" for member in our_enum} == names
