"""Bearer tokens: who has one, whose it is, until when, and what the file may say."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hmac
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import (
    cache_policy_pb2,
    cache_service_pb2,
    inference_service_pb2,
    model_service_pb2,
    server_service_pb2,
)
from icehouse_server.config import ConnectionConfig, SecurityConfig, TenantConfig
from icehouse_server.domain.cache_commands import EvictReport, VerifyReport
from icehouse_server.domain.ids import BlockHash
from icehouse_server.errors import Reason, StartError
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import TOKEN_COUNT_LIMIT, TokenFile, digest_of, line_of, new_token

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.details import Refusal, refused
from tests.fixtures.rpc.stubs import done
from tests.unit.rpc.conftest import RunningServer, running

GENERATE = inference_service_pb2.GenerateRequest(prompt={"text": "Hi"}, max_output_tokens=1)
SEARCH, ADS, BOSS = new_token(), new_token(), new_token()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def write(path: Path, *lines: str) -> None:
    """Put the file in place in one step, as a server that reads it over and over needs it."""
    written = path.with_name(f"{path.name}.new")
    written.write_text("".join(f"{line}\n" for line in lines))
    written.chmod(0o600)
    written.replace(path)


def line(
    token: str, tenant: str, role: CallerRole = CallerRole.TENANT, *, last_day: str | None = None
) -> str:
    date = None if last_day is None else datetime.date.fromisoformat(last_day)
    return line_of(token, tenant=tenant, role=role, expire_date=date)


@contextlib.asynccontextmanager
async def guarded_server(
    tmp_path: Path,
    *,
    tenants: TenantConfig | None = None,
    connection: ConnectionConfig | None = None,
    server: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[RunningServer]:
    """Start a server with three tokens: two tenants and an operator. `settings` are SecurityConfig's."""
    file = tmp_path / "tokens"
    write(
        file, "# ours", line(SEARCH, "search"), "", line(ADS, "ads"), line(BOSS, "boss", CallerRole.OPERATOR)
    )
    security = SecurityConfig(token_file=str(file), **settings)
    async with running(security=security, tenants=tenants, connection=connection, **server) as served:
        yield served


def unauthenticated(refusal: Refusal, reason: Reason) -> bool:
    return (refusal.code, refusal.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)


async def test_a_token_lets_in_and_names_the_tenant(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        for token, tenant in ((SEARCH, "search"), (ADS, "ads")):
            await served.inference.Generate(GENERATE, metadata=bearer(token))
            assert served.engine.submitted[-1].tenant == tenant


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), Reason.CREDENTIALS_MISSING),
        (bearer(""), Reason.CREDENTIALS_INVALID),
        (bearer(new_token()), Reason.CREDENTIALS_INVALID),
        (bearer(SEARCH[:-1]), Reason.CREDENTIALS_INVALID),
        (bearer(SEARCH + "x"), Reason.CREDENTIALS_INVALID),
        (bearer(digest_of(SEARCH).hex()), Reason.CREDENTIALS_INVALID),
        ((("authorization", f"Basic {SEARCH}"),), Reason.CREDENTIALS_INVALID),
        ((*bearer(SEARCH), *bearer(ADS)), Reason.CREDENTIALS_INVALID),
    ],
)
async def test_without_a_good_token_nothing_is_served(
    tmp_path: Path, metadata: tuple[tuple[str, str], ...], reason: Reason
) -> None:
    async with guarded_server(tmp_path) as served:
        calls = (
            served.inference.Generate(GENERATE, metadata=metadata),
            served.inference.Stream(GENERATE, metadata=metadata).read(),
            served.models.ListModels(model_service_pb2.ListModelsRequest(), metadata=metadata),
            served.serving.WatchStats(server_service_pb2.WatchStatsRequest(), metadata=metadata).read(),
        )
        for call in calls:
            refusal = await refused(call)
            assert unauthenticated(refusal, reason)
            assert SEARCH not in refusal.message
        assert served.engine.submitted == []


async def test_a_stranger_is_refused_before_the_message_is_read(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        call: Any = served.channel.stream_unary("/icehouse.v1.InferenceService/Generate")()
        # Nothing is written: the answer must not wait for it.
        assert unauthenticated(await refused(call), Reason.CREDENTIALS_MISSING)


async def test_the_scheme_is_read_in_any_case(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        await served.inference.Generate(GENERATE, metadata=(("authorization", f"bEARER {SEARCH}"),))


@pytest.mark.parametrize("is_open", [True, False])
async def test_health_may_stay_open(tmp_path: Path, is_open: bool) -> None:
    async with guarded_server(tmp_path, health_open=is_open) as served:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        request = health_pb2.HealthCheckRequest()
        if is_open:
            assert (await stub.Check(request)).status
            assert (await stub.Watch(request).read()).status
        else:
            assert unauthenticated(await refused(stub.Check(request)), Reason.CREDENTIALS_MISSING)
            assert (await stub.Check(request, metadata=bearer(SEARCH))).status


async def test_reflection_wants_a_token_too(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
        # Nothing is written: a client whose write meets the refusal reports the write.
        call: Any = served.channel.stream_stream(method)()
        assert unauthenticated(await refused(call.read()), Reason.CREDENTIALS_MISSING)
        call = served.channel.stream_stream(method)(iter([b"\x3a\x00"]), metadata=bearer(SEARCH))
        assert b"icehouse.v1.InferenceService" in await call.read()


async def test_the_body_may_not_name_another_tenant(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        request = inference_service_pb2.GenerateRequest(
            prompt={"text": "Hi"}, max_output_tokens=1, cache=cache_policy_pb2.CachePolicy(tenant="ads")
        )
        refusal = await refused(served.inference.Generate(request, metadata=bearer(SEARCH)))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.TENANT_FORBIDDEN)
        assert refusal.field == "cache.tenant"
        for token in (ADS, BOSS):
            await served.inference.Generate(request, metadata=bearer(token))
            assert served.engine.submitted[-1].tenant == "ads"


def reading(method: Any) -> Any:
    """Return a call of a stream that reads its first message."""
    return lambda request, **options: method(request, **options).read()


async def test_commands_reach_the_callers_own_blocks_only(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        foreign: Any = {"prompt": {"text": "Hi"}, "cache": {"tenant": "ads"}}
        served.engine.order_answer = EvictReport()
        for message, method in (
            (cache_service_pb2.ExplainRequest(**foreign), served.cache.Explain),
            (cache_service_pb2.WarmRequest(**foreign), reading(served.cache.Warm)),
            (cache_service_pb2.PinRequest(**foreign), served.cache.Pin),
            (cache_service_pb2.UnpinRequest(**foreign), served.cache.Unpin),
            (
                cache_service_pb2.EvictRequest(**foreign),
                reading(served.cache.Evict),
            ),
        ):
            assert (await refused(method(message, metadata=bearer(SEARCH)))).reason == "TENANT_FORBIDDEN"
        assert served.engine.orders == []
        evict = cache_service_pb2.EvictRequest(prompt={"text": "Hi"})
        await done(served.cache.Evict(evict, metadata=bearer(SEARCH)))
        assert served.engine.orders[0].scope.tenant == "search"


async def test_archives_are_of_the_callers_own_tenant(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        policy = {"tenant": "somebody"}
        export = cache_service_pb2.ExportRequest(cache=policy)
        first = cache_service_pb2.ImportRequest(target={"cache": policy})
        for call in (
            served.cache.Export(export, metadata=bearer(SEARCH)).read(),
            served.cache.Import(iter([first]), metadata=bearer(SEARCH)),
        ):
            assert (await refused(call)).reason == "TENANT_FORBIDDEN"
        for unnamed in (
            served.cache.Export(export).read(),
            served.cache.Import(iter([first])),
        ):
            assert (await refused(unnamed)).code == grpc.StatusCode.UNAUTHENTICATED
        too_long = cache_service_pb2.ImportRequest(chunk=bytes((1 << 20) + 5000))
        refusal = await refused(served.cache.Import(iter([too_long]), metadata=bearer(SEARCH)))
        assert refusal.reason == "MESSAGE_MALFORMED"
        assert served.engine.orders == []


async def test_what_concerns_all_tenants_is_left_to_operators(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        evict_all = cache_service_pb2.EvictAllRequest()
        verify = cache_service_pb2.VerifyRequest()
        stats = inference_service_pb2.CacheStatsRequest()
        for call in (
            served.cache.EvictAll(evict_all, metadata=bearer(SEARCH)).read(),
            served.cache.Verify(verify, metadata=bearer(SEARCH)).read(),
            served.inference.CacheStats(stats, metadata=bearer(SEARCH)),
        ):
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, Reason.OPERATOR_ONLY)
        assert served.engine.orders == []
        served.engine.order_answer = EvictReport(ram_block_count=3)
        removed = await done(served.cache.EvictAll(evict_all, metadata=bearer(BOSS)))
        assert removed.ram_block_count == 3
        served.engine.order_answer = VerifyReport(1, 2, (), 0.0)
        served.engine.stored = (BlockHash(bytes(32)),)
        found = await done(served.cache.Verify(verify, metadata=bearer(BOSS)))
        assert found.verified_block_count == 1
        assert (await served.inference.CacheStats(stats, metadata=bearer(BOSS))).HasField("collect_time")


async def test_a_changed_file_is_taken_into_use_and_a_bad_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_server(tmp_path) as served:
        write(tmp_path / "tokens", line(ADS, "ads"))
        await served.server.security.refresh()
        refusal = await refused(served.inference.Generate(GENERATE, metadata=bearer(SEARCH)))
        assert unauthenticated(refusal, Reason.CREDENTIALS_INVALID)
        await served.inference.Generate(GENERATE, metadata=bearer(ADS))

        with caplog.at_level(logging.ERROR):
            write(tmp_path / "tokens", line(SEARCH, "search"), "nonsense")
            await served.server.security.refresh()
            (tmp_path / "tokens").unlink()
            await served.server.security.refresh()
        await served.inference.Generate(GENERATE, metadata=bearer(ADS))
        details = [vars(r)["detail"] for r in caplog.records if r.getMessage() == "old_secrets_kept"]
        assert "line 2" in details[0]


async def test_an_expired_token_is_none(tmp_path: Path) -> None:
    write(tmp_path / "tokens", line(SEARCH, "search", last_day="2023-11-14"))
    async with running(security=SecurityConfig(token_file=str(tmp_path / "tokens"))) as served:
        # The clock's wall time is 2023-11-14 22:30 UTC: the last day is not over.
        await served.inference.Generate(GENERATE, metadata=bearer(SEARCH))
        served.clock.now += 2 * 3600
        refusal = await refused(served.inference.Generate(GENERATE, metadata=bearer(SEARCH)))
        assert unauthenticated(refusal, Reason.CREDENTIALS_INVALID)


async def test_the_last_of_all_days_never_ends(tmp_path: Path) -> None:
    async with guarded_server(tmp_path) as served:
        write(tmp_path / "tokens", line(SEARCH, "search", last_day="9999-12-31"))
        await served.server.security.refresh()
        await served.inference.Generate(GENERATE, metadata=bearer(SEARCH))
        refusal = await refused(served.inference.Generate(GENERATE, metadata=bearer(ADS)))
        assert unauthenticated(refusal, Reason.CREDENTIALS_INVALID)


async def test_a_failure_of_our_own_does_not_end_the_reloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, looks, has_failed_twice = asyncio.get_running_loop(), itertools.count(1), asyncio.Event()

    def overflow(text: str) -> None:
        if next(looks) == 2:
            loop.call_soon_threadsafe(has_failed_twice.set)
        raise OverflowError("date value out of range")

    async with guarded_server(tmp_path, reload_s=0.001) as served:
        with monkeypatch.context() as broken:
            broken.setattr("icehouse_server.rpc.access.tokens._token_of", overflow)
            write(tmp_path / "tokens", line(ADS, "ads"))
            async with asyncio.timeout(BOUND_S):
                await has_failed_twice.wait()
            await served.inference.Generate(GENERATE, metadata=bearer(SEARCH))
        details = [vars(r)["detail"] for r in caplog.records if r.getMessage() == "old_secrets_kept"]
        assert details == ["OverflowError: date value out of range"]
        assert "security" in {task.get_name() for task in asyncio.all_tasks()}
        await served.server.security.refresh()
        refusal = await refused(served.inference.Generate(GENERATE, metadata=bearer(SEARCH)))
        assert unauthenticated(refusal, Reason.CREDENTIALS_INVALID)


async def test_an_empty_file_lets_nobody_in_and_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "tokens", "# nobody yet")
    async with running(security=SecurityConfig(token_file=str(tmp_path / "tokens"))) as served:
        refusal = await refused(served.inference.Generate(GENERATE, metadata=bearer(SEARCH)))
        assert unauthenticated(refusal, Reason.CREDENTIALS_INVALID)
    assert "empty_token_file_read" in caplog.text


async def test_a_file_that_becomes_empty_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded_server(tmp_path) as served:
        write(tmp_path / "tokens")
        await served.server.security.refresh()
        await served.server.security.refresh()
        assert caplog.text.count("empty_token_file_read") == 1
        refusal = await refused(served.inference.Generate(GENERATE, metadata=bearer(SEARCH)))
        assert unauthenticated(refusal, Reason.CREDENTIALS_INVALID)


@pytest.mark.parametrize(
    "bad",
    [
        "sha256=12 tenant=a",
        f"sha256={'g' * 64} tenant=a",
        f"sha256={'a' * 64}",
        f"sha256={'a' * 64} tenant=ü",
        f"sha256={'a' * 64} tenant=a role=king",
        f"sha256={'a' * 64} tenant=a expires=tomorrow",
        f"sha256={'a' * 64} tenant=a colour=red",
        f"sha256={'a' * 64} tenant=a\nsha256={'a' * 64} tenant=b",
        "\n".join(f"sha256={index:064x} tenant=a" for index in range(TOKEN_COUNT_LIMIT + 1)),
    ],
)
def test_a_bad_line_is_refused_whole(tmp_path: Path, bad: str) -> None:
    write(tmp_path / "tokens", line(SEARCH, "search"))
    file = TokenFile(tmp_path / "tokens")
    assert file.refresh() and not file.refresh()
    write(tmp_path / "tokens", bad)
    with pytest.raises(StartError) as caught:
        file.refresh()
    assert caught.value.reason is Reason.TOKENS_INVALID
    assert file.find(SEARCH, now=0) is not None


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "tokens", line(SEARCH, "search"))
    (tmp_path / "tokens").chmod(0o620)
    with pytest.raises(StartError, match="chmod 600"):
        TokenFile(tmp_path / "tokens").refresh()


def test_every_token_is_compared_whichever_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tokens", *(line(token, "x") for token in (SEARCH, ADS, BOSS)))
    file = TokenFile(tmp_path / "tokens")
    file.refresh()
    compared = []
    real = hmac.compare_digest

    def compare(known: bytes, wanted: bytes) -> bool:
        compared.append(known)
        return real(known, wanted)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for token in (SEARCH, BOSS, new_token()):
        compared.clear()
        file.find(token, now=0)
        assert len(compared) == 3


def test_tokens_are_long_and_never_the_same() -> None:
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert {len(token) for token in made} == {len("icehouse_") + 43}
