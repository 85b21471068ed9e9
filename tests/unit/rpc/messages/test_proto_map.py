"""The map of counters: both sides name the same fields."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import types
import typing
from typing import Any

import pytest
from google.protobuf.message import Message
from icehouse.v1 import (
    adapter_pb2,
    cache_policy_pb2,
    cache_service_pb2,
    cache_stats_pb2,
    engine_stats_pb2,
    group_stats_pb2,
    model_service_pb2,
    prompt_pb2,
    server_service_pb2,
    slow_request_pb2,
    tenant_stats_pb2,
    tool_pb2,
    usage_pb2,
)
from icehouse_server.domain import cache_commands, cache_stats, chat, events, request, stats
from icehouse_server.domain.cache_commands import EvictReport, SessionEndReport
from icehouse_server.domain.ids import AdapterDigest, AdapterName, Tenant
from icehouse_server.domain.model import AdapterInfo, ModelInfo, PassSplit, ReplyFormatInfo
from icehouse_server.rpc.engine_client.open_requests import RequestPhase
from icehouse_server.rpc.messages.proto_map import (
    enum_of,
    enum_proto,
    fill,
    names_of,
    to_proto,
)

from tests.fixtures.rpc.fake_engine import MODEL_INFO

PAIRS: list[tuple[type[Any], type[Message]]] = [
    (stats.EngineStats, engine_stats_pb2.EngineStats),
    (stats.GroupStats, group_stats_pb2.GroupStats),
    (stats.RankStats, group_stats_pb2.RankStats),
    (stats.RankTierStats, group_stats_pb2.RankTierStats),
    (stats.SlowRequest, slow_request_pb2.SlowRequest),
    (stats.ModelStats, server_service_pb2.ModelStats),
    (cache_stats.CacheStats, cache_stats_pb2.CacheStats),
    (cache_stats.TierStats, cache_stats_pb2.CacheTierStats),
    (cache_stats.AgePercentiles, cache_stats_pb2.AgePercentiles),
    (cache_stats.LookupStats, cache_stats_pb2.CacheLookupStats),
    (cache_stats.MissTokens, cache_stats_pb2.CacheMissTokens),
    (cache_stats.SpillStats, cache_stats_pb2.CacheSpillStats),
    (cache_stats.SpillDrops, cache_stats_pb2.SpillDrops),
    (cache_stats.PromoteStats, cache_stats_pb2.CachePromoteStats),
    (cache_stats.IntegrityStats, cache_stats_pb2.CacheIntegrityStats),
    (cache_stats.DiskStats, cache_stats_pb2.CacheDiskStats),
    (cache_stats.ReconcileReport, cache_stats_pb2.CacheReconcileReport),
    (cache_stats.SessionStats, cache_stats_pb2.CacheSessionStats),
    (cache_stats.PrefetchStats, cache_stats_pb2.CachePrefetchStats),
    (cache_stats.SharedStats, cache_stats_pb2.CacheSharedStats),
    (EvictReport, cache_service_pb2.EvictResult),
    (SessionEndReport, cache_service_pb2.EndSessionResponse),
]
LIMITS = {
    "waiting_limit",
    "running_limit",
    "ram_limit_bytes",
    "ssd_limit_bytes",
    "tokens_per_minute",
    "tokens_left",
}
"""Of a tenant, set by hand."""


def filled(kind: type[Any], numbers: itertools.count[int]) -> Any:
    """Return an instance of a counters dataclass in which every number is another."""
    hints = typing.get_type_hints(kind)
    return kind(**{f.name: _value(hints[f.name], numbers) for f in dataclasses.fields(kind)})


def _value(hint: Any, numbers: itertools.count[int]) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], numbers) for _ in range(2))
    if dataclasses.is_dataclass(hint):
        return filled(hint, numbers)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)[next(numbers) % len(hint)]
    if hint is bool:
        return True
    return hint(next(numbers))


@pytest.mark.parametrize(("kind", "message"), PAIRS, ids=lambda side: side.__name__)
def test_both_sides_name_the_same_fields(kind: type[Any], message: type[Message]) -> None:
    others = {"state", "state_detail", "aliases"} if kind is ModelInfo else set()
    assert {name for _, name in names_of(kind)} == set(message.DESCRIPTOR.fields_by_name) - others


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AdapterInfo, adapter_pb2.Adapter),
        (ModelInfo, model_service_pb2.Model),
        (ReplyFormatInfo, model_service_pb2.ReplyFormat),
        (cache_commands.BlockMatch, cache_service_pb2.BlockMatch),
    ],
    ids=lambda side: side.__name__,
)
def test_facts_of_models_and_blocks_are_sent_by_their_names(kind: type[Any], message: type[Message]) -> None:
    others = {"state", "state_detail", "aliases"} if kind is ModelInfo else set()
    assert {name for _, name in names_of(kind)} == set(message.DESCRIPTOR.fields_by_name) - others


def test_bytes_are_sent_as_hexadecimal_text() -> None:
    adapter = AdapterInfo(
        AdapterName("fr"), "lora", AdapterDigest(b"\xab\x01"), parameter_count=2, weight_bytes=3
    )
    message = to_proto(adapter, adapter_pb2.Adapter)
    assert (message.name, message.digest, message.weight_bytes) == ("fr", "ab01", 3)


def test_a_models_facts_are_sent() -> None:
    info = dataclasses.replace(MODEL_INFO, pass_splits=tuple(PassSplit), runs_images_whole=True)
    message = to_proto(info, model_service_pb2.Model)
    assert list(message.pass_splits) == [1, 2, 3] and message.runs_images_whole
    assert (message.id, message.context_tokens) == (info.model_id, info.context_token_limit)


def test_a_tenants_numbers_are_its_use_its_share_and_its_limits() -> None:
    use, share = ({name for _, name in names_of(kind)} for kind in (stats.TenantUse, cache_stats.TenantShare))
    assert use | share | LIMITS == set(tenant_stats_pb2.TenantStats.DESCRIPTOR.fields_by_name)
    assert use & share == {"tenant"} and not (use | share) & LIMITS


def test_a_servers_stats_are_all_of_the_response_but_the_tenants() -> None:
    fields = set(server_service_pb2.ServerStats.DESCRIPTOR.fields_by_name)
    assert {name for _, name in names_of(stats.ServerStats)} == fields - {"tenants"}


def test_no_pair_was_forgotten() -> None:
    reached: set[str] = set()
    todo = [server_service_pb2.ServerStats.DESCRIPTOR]
    while todo:
        message = todo.pop()
        for field in message.fields:
            inner = field.message_type
            if inner is not None and inner.file.package == "icehouse.v1" and inner.full_name not in reached:
                reached.add(inner.full_name)
                todo.append(inner)
    named = {message.DESCRIPTOR.full_name for _, message in PAIRS} - {
        "icehouse.v1.EvictResult",
        "icehouse.v1.EndSessionResponse",
    }
    assert reached == named | {"icehouse.v1.TenantStats"}


def test_what_is_none_is_absent_and_what_is_empty_is_there() -> None:
    message = to_proto(stats.ServerStats(0.0, engine=stats.EngineStats()), server_service_pb2.ServerStats)
    assert message.HasField("engine") and not message.HasField("cache")
    assert message.HasField("collect_time") and message.engine.HasField("uptime")


def test_fields_that_the_dataclass_lacks_stay_as_they_are() -> None:
    message = tenant_stats_pb2.TenantStats(waiting_limit=3)
    assert fill(message, stats.TenantUse(Tenant("a"), waiting_count=2)) is message
    assert (message.tenant, message.waiting_count, message.waiting_limit) == ("a", 2, 3)


ENUMS: list[tuple[type[enum.Enum], Any]] = [
    (cache_commands.Tier, cache_service_pb2.CacheTier),
    (chat.ImageDetail, prompt_pb2.ImageDetail),
    (chat.PromptChangeKind, usage_pb2.PromptChangeKind),
    (chat.ToolMode, tool_pb2.ToolChoiceMode),
    (events.FinishReason, usage_pb2.FinishReason),
    (events.ReuseLimit, usage_pb2.ReuseLimit),
    (stats.RankState, group_stats_pb2.RankState),
    (RequestPhase, server_service_pb2.RequestPhase),
    (request.CacheUse, cache_policy_pb2.CacheUse),
]


@pytest.mark.parametrize(("kind", "told"), ENUMS, ids=lambda each: getattr(each, "__name__", ""))
def test_an_enum_goes_by_its_names_both_ways(kind: type[enum.Enum], told: Any) -> None:
    first = next(iter(kind))
    values = [enum_proto(member, told) for member in kind]
    assert [enum_of(value, told, kind, unset=first) for value in values] == list(kind)
    assert sorted(told.values()) == [0, *sorted(values)]
    assert enum_of(0, told, kind, unset=first) is first and enum_of(99, told, kind, unset=first) is None
