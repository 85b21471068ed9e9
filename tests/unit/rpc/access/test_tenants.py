"""Each tenant's share of the edge: waiting, tokens per minute, and the numbers it is told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from icehouse.v1 import cache_policy_pb2, cache_service_pb2, server_service_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.config import TenantConfig
from icehouse_server.domain.cache_stats import CacheStats, TenantShare
from icehouse_server.domain.events import Event
from icehouse_server.domain.ids import Tenant
from icehouse_server.domain.request import GenerationRequest
from icehouse_server.domain.stats import TenantUse
from icehouse_server.rpc.access import tenants as tenants_module
from icehouse_server.rpc.access.tenants import Tenants
from icehouse_server.rpc.calls.methods import METHODS, CallCost
from icehouse_server.rpc.rpc_server import pool_with_v1

from tests.fixtures.engine import FakeClock
from tests.fixtures.engine import request as generation_request
from tests.fixtures.rpc.details import refusal_of, refused
from tests.fixtures.rpc.fake_engine import counting, hanging, started
from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.access.test_tokens import ADS, BOSS, SEARCH, bearer, guarded_server
from tests.unit.rpc.conftest import RunningServer, running


def request_of(tenant: str, *, max_output_tokens: int = 4, text: str = "Hi") -> messages.GenerateRequest:
    policy = cache_policy_pb2.CachePolicy(tenant=tenant)
    return messages.GenerateRequest(prompt={"text": text}, max_output_tokens=max_output_tokens, cache=policy)


def silent(request: GenerationRequest) -> list[Event]:
    """Script: never leave the queue."""
    return []


async def stats_of(served: RunningServer, tenant: str = "") -> Any:
    response = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
    [found] = [stats for stats in response.tenants if stats.tenant == tenant]
    return found


async def test_a_tenant_that_fills_its_queue_is_refused_and_others_are_not() -> None:
    async with running(tenants=TenantConfig(waiting_limit=2)) as served:
        served.engine.script = silent
        waiting = [asyncio.ensure_future(served.inference.Generate(request_of("a"))) for _ in range(2)]
        while len(served.engine.submitted) < 2:
            await served.settle()
        refusal = await refused(served.inference.Generate(request_of("a")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUEUE_FULL")
        assert refusal.info.metadata["tenant"] == "a"
        assert refusal.quota.violations[0].subject == "tenant:a"
        assert refusal.retry.retry_delay.ToTimedelta().total_seconds() == 1
        served.engine.script = counting
        assert (await served.inference.Generate(request_of("b"))).text
        stats = await stats_of(served, "a")
        assert (stats.waiting_count, stats.waiting_limit, stats.refused_total) == (2, 2, 1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_running_request_waits_no_more() -> None:
    async with running(tenants=TenantConfig(waiting_limit=1)) as served:
        served.engine.script = hanging
        streams = []
        for _ in range(3):
            streams.append(served.inference.Stream(request_of("a")))
            assert (await streams[-1].read()).WhichOneof("event") == "started"
        stats = await stats_of(served, "a")
        assert (stats.waiting_count, stats.running_count, stats.accepted_total) == (0, 3, 3)
        for stream in streams:
            stream.cancel()
            await served.cancelled()
        while (await stats_of(served, "a")).running_count:
            await served.settle()


async def test_tokens_per_minute_are_a_limit_with_its_wait() -> None:
    async with running(tenants=TenantConfig(tokens_per_minute=60)) as served:
        # 2 prompt tokens and 28 of output: two of them are a minute's tokens.
        for _ in range(2):
            await served.inference.Generate(request_of("a", max_output_tokens=28))
        refusal = await refused(served.inference.Generate(request_of("a", max_output_tokens=28)))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOKEN_RATE_EXCEEDED")
        assert refusal.retry.retry_delay.ToTimedelta().total_seconds() == 30
        assert dict(refusal.info.metadata) == {
            "tenant": "a",
            "tokens_per_minute": "60",
            "tokens_left": "0",
            "tokens_wanted": "30",
        }
        await served.inference.Generate(request_of("b", max_output_tokens=28))
        served.clock.now += 30
        served.engine.heartbeat_time = served.clock.now
        await served.inference.Generate(request_of("a", max_output_tokens=28))


async def test_what_was_reserved_and_not_used_comes_back() -> None:
    async with running(tenants=TenantConfig(tokens_per_minute=60)) as served:
        served.engine.script = silent
        stream = served.inference.Stream(request_of("a", max_output_tokens=50))
        while not served.engine.submitted:
            await served.settle()
        assert (await stats_of(served, "a")).tokens_left == 8
        stream.cancel()
        await served.cancelled()
        while (await stats_of(served, "a")).waiting_count:
            await served.settle()
        assert (await stats_of(served, "a")).tokens_left == 60
        served.engine.script = hanging
        stream = served.inference.Stream(request_of("a", max_output_tokens=50))
        for _ in range(2):
            await stream.read()
        stream.cancel()
        await served.cancelled()
        while (await stats_of(served, "a")).running_count:
            await served.settle()
        # The prompt's two tokens and the one that was drawn.
        assert (await stats_of(served, "a")).tokens_left == 57


async def test_the_numbers_of_a_tenant_add_up() -> None:
    config = TenantConfig(tokens_per_minute=6000, ram_bytes=10, ssd_bytes=20)
    async with running(tenants=config) as served:
        share = TenantShare(Tenant("a"), ram_bytes=5, ssd_bytes=7)
        served.engine.cache_stats = CacheStats(tenants=(share,))
        await served.inference.Generate(request_of("a", text="four"))
        warm = cache_service_pb2.WarmRequest(prompt={"text": "abc"}, cache=request_of("a").cache)
        await done(served.cache.Warm(warm))
        stats = await stats_of(served, "a")
        assert (stats.accepted_total, stats.prompt_token_total, stats.output_token_total) == (2, 7, 4)
        assert stats.cached_token_total == 6
        assert (stats.tokens_per_minute, stats.tokens_left) == (6000, 5989)
        assert (stats.ram_bytes, stats.ram_limit_bytes) == (5, 10)
        assert (stats.ssd_bytes, stats.ssd_limit_bytes) == (7, 20)
        assert (stats.waiting_count, stats.running_count) == (0, 0)


async def test_a_sample_has_every_tenants_use() -> None:
    async with running(tenants=TenantConfig(waiting_limit=1)) as served:
        await served.inference.Generate(request_of("a", text="four"))
        served.engine.script = silent
        waiting = served.inference.Stream(request_of("b", text="abc"))
        while len(served.engine.submitted) < 2:
            await served.settle()
        await refused(served.inference.Generate(request_of("b")))
        await served.server.observation.sample()
        a, b = served.server.observation.latest.tenants
        assert a == TenantUse(
            Tenant("a"),
            accepted_total=1,
            prompt_token_total=4,
            cached_token_total=3,
            output_token_total=4,
        )
        assert b == TenantUse(
            Tenant("b"), waiting_count=1, accepted_total=1, refused_total=1, prompt_token_total=3
        )
        waiting.cancel()
        await served.cancelled()


async def test_a_tenant_is_told_of_itself_only_and_an_operator_of_all(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        for token, name in ((SEARCH, "one"), (ADS, "two")):
            request = messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1, request_id=name)
            await served.inference.Generate(request, metadata=bearer(token))
        own = (
            await served.serving.GetStats(server_service_pb2.GetStatsRequest(), metadata=bearer(SEARCH))
        ).stats
        assert [stats.tenant for stats in own.tenants] == ["search"]
        assert {field.name for field, _ in own.ListFields()} == {
            "collect_time",
            "tenants",
            "slowest_requests",
        }
        assert [slow.request_id for slow in own.slowest_requests] == ["one"]
        watch = served.serving.WatchStats(server_service_pb2.WatchStatsRequest(), metadata=bearer(ADS))
        assert [stats.tenant for stats in (await watch.read()).stats.tenants] == ["ads"]
        watch.cancel()
        everything = (
            await served.serving.GetStats(server_service_pb2.GetStatsRequest(), metadata=bearer(BOSS))
        ).stats
        assert {stats.tenant for stats in everything.tenants} == {"search", "ads"}
        assert everything.engine.step_total == 7
        assert {slow.request_id for slow in everything.slowest_requests} == {"one", "two"}


def test_what_all_run_is_kept_as_each_one_does() -> None:
    tenants = Tenants(TenantConfig(), running_limit=0, clock=FakeClock())
    requests = [dataclasses.replace(generation_request(name), tenant=Tenant(name)) for name in "aab"]

    def counted() -> tuple[int, int]:
        return tenants.total().waiting_count, tenants.total().running_count

    with contextlib.ExitStack() as stack:
        for running_count, request in enumerate(requests):
            [stay] = stack.enter_context(tenants.staying([request]))
            assert counted() == (1, running_count)
            stay.note(started(request))
            assert counted() == (0, running_count + 1)
        stack.enter_context(tenants.staying(requests[:2]))
        assert counted() == (2, 3)
        assert tenants.use_of(Tenant("a")).running_count == 2
    assert counted() == (0, 0)
    assert tenants.use_of(Tenant("none")) == TenantUse(Tenant("none")) and len(list(tenants)) == 2


async def test_names_that_callers_make_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "ACCOUNT_LIMIT", 3)
    async with running() as served:
        served.engine.script = hanging
        stream = served.inference.Stream(request_of("busy"))
        await stream.read()
        served.engine.script = counting
        for index in range(10):
            await served.inference.Generate(request_of(f"t{index}"))
        response = (await served.serving.GetStats(server_service_pb2.GetStatsRequest())).stats
        assert [stats.tenant for stats in response.tenants] == ["busy", "t8", "t9"]
        stream.cancel()
        await served.cancelled()


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.cost is CallCost.PROMPT])
async def test_prompts_that_the_engine_does_not_run_count_too(tmp_path: Path, name: str) -> None:
    """One minute's tokens are used up by one call; then that tenant has to wait, and no other."""
    pool: Any = pool_with_v1()
    service, _, method = name.partition("/")
    message = GetMessageClass(pool.FindServiceByName(service).methods_by_name[method].input_type)
    has_prompt = "prompt" in message.DESCRIPTOR.fields_by_name
    asked = message(prompt={"text": "a" * 10}) if has_prompt else message(token_ids=[97] * 10)
    data = asked.SerializeToString()
    async with guarded_server(tmp_path, tenants=TenantConfig(tokens_per_minute=10)) as served:
        call: Any = served.channel.unary_stream(f"/{name}")

        async def reason(token: str) -> str:
            try:
                await call(data, metadata=bearer(token)).read()
            except grpc.aio.AioRpcError as error:
                return refusal_of(error).reason
            return ""

        assert await reason(SEARCH) != "TOKEN_RATE_EXCEEDED"
        assert await reason(SEARCH) == "TOKEN_RATE_EXCEEDED"
        assert await reason(ADS) != "TOKEN_RATE_EXCEEDED"
