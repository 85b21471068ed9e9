"""Who may start from a tenant's prompts that are shared by name."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from icehouse.v1 import cache_policy_pb2, cache_service_pb2
from icehouse.v1 import inference_service_pb2 as messages
from icehouse_server.config import TenantConfig
from icehouse_server.domain.ids import CacheScope, Tenant

from tests.fixtures.rpc.details import refused
from tests.unit.rpc.access.test_tokens import ADS, BOSS, SEARCH, bearer, guarded_server
from tests.unit.rpc.conftest import RunningServer

TOKENS = {"search": SEARCH, "ads": ADS, "boss": BOSS}

GRANTS = TenantConfig(shared_prefixes=" handbook , legal = ads+finance,closed=")


def request_of(name: str) -> messages.GenerateRequest:
    policy = cache_policy_pb2.CachePolicy(shared_prefix_name=name)
    return messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1, cache=policy)


def test_grants_are_read() -> None:
    assert GRANTS.shared_prefix_grants == {
        "handbook": None,
        "legal": frozenset({"ads", "finance"}),
        "closed": frozenset(),
    }
    assert TenantConfig().shared_prefix_grants == {}


@pytest.mark.parametrize(
    ("caller", "name"),
    [
        ("search", "handbook"),
        ("ads", "handbook"),
        ("ads", "legal"),
        ("boss", "closed"),
        ("boss", "never heard of"),
    ],
)
async def test_who_may_reads_it_and_writes_as_itself(tmp_path: Path, caller: str, name: str) -> None:
    async with guarded_server(tmp_path, tenants=GRANTS) as served:
        await served.inference.Generate(request_of(name), metadata=bearer(TOKENS[caller]))
        [request] = served.engine.submitted
        assert request.shared_tenant == name
        assert request.tenant == caller


@pytest.mark.parametrize(
    ("caller", "name"), [("search", "legal"), ("search", "closed"), ("search", "ads"), ("ads", "boss")]
)
async def test_who_may_not_is_refused(tmp_path: Path, caller: str, name: str) -> None:
    async with guarded_server(tmp_path, tenants=GRANTS) as served:
        warm = cache_service_pb2.WarmRequest(prompt={"text": "Hi"}, cache=request_of(name).cache)
        explain = cache_service_pb2.ExplainRequest(prompt={"text": "Hi"}, cache=request_of(name).cache)
        for call in (
            served.inference.Generate(request_of(name), metadata=bearer(TOKENS[caller])),
            served.cache.Warm(warm, metadata=bearer(TOKENS[caller])).read(),
            served.cache.Explain(explain, metadata=bearer(TOKENS[caller])),
        ):
            refusal = await refused(call)
            assert refusal.code is grpc.StatusCode.PERMISSION_DENIED
            assert refusal.reason == "SHARED_PREFIX_FORBIDDEN"
            assert refusal.info.metadata["shared_prefix_name"] == name
        assert not served.engine.submitted


async def test_without_credentials_any_name_will_do(served: RunningServer) -> None:
    await served.inference.Generate(request_of("handbook"))
    assert served.engine.submitted[0].shared_tenant == "handbook"
    await served.inference.Generate(messages.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1))
    assert served.engine.submitted[1].shared_tenant is None
    refusal = await refused(served.inference.Generate(request_of("x" * 129)))
    assert refusal.reason == "PARAMETER_OUT_OF_RANGE"


async def test_explain_asks_with_it(served: RunningServer) -> None:
    request = cache_service_pb2.ExplainRequest(prompt={"text": "Hi"}, cache=request_of("handbook").cache)
    assert (await refused(served.cache.Explain(request))).reason == "CACHE_UNSUPPORTED"
    assert served.engine.orders[-1].shared_scope == CacheScope(Tenant("handbook"))
