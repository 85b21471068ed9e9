"""`icehouse top`: what is shown of a server, the rates between two looks, and a server that goes away."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
from icehouse.v1.cache_stats_pb2 import (
    CacheDiskStats,
    CacheLookupStats,
    CachePromoteStats,
    CacheSpillStats,
    CacheStats,
    CacheTierStats,
)
from icehouse.v1.engine_stats_pb2 import EngineStats
from icehouse.v1.group_stats_pb2 import GroupStats, RankState, RankStats, RankTierStats
from icehouse.v1.server_service_pb2 import ServerStats
from icehouse.v1.slow_request_pb2 import SlowRequest
from icehouse_client.cli.connection import Server, open_client
from icehouse_client.cli.main import app
from icehouse_client.cli.top import Rates, looks, rates_between, screen, sparkline
from icehouse_server.config import SecurityConfig
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token
from icehouse_server.rpc.messages.proto_map import duration_proto
from rich.console import Console
from typer.testing import CliRunner

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority
from tests.unit.rpc.conftest import running

MIB, GIB = 1 << 20, 1 << 30


def engine(uptime_s: float = 100.0, **counts: int) -> EngineStats:
    """Return an engine's counters, with those named grown by so many."""
    found = EngineStats(
        uptime=duration_proto(uptime_s),
        waiting_count=2,
        waiting_limit=256,
        loading_count=1,
        prefilling_count=3,
        decoding_count=4,
        decoding_limit=16,
        finished_total=50,
        rejected_total=7,
        failed_total=3,
        prefilled_token_total=1000,
        cached_token_total=4000,
        output_token_total=2000,
        decode_step_duration_p50=duration_proto(0.034),
        decode_step_duration_p99=duration_proto(2.5),
        active_memory_bytes=3 * GIB,
        memory_limit_bytes=8 * GIB,
    )
    for name, count in counts.items():
        setattr(found, name, getattr(found, name) + count)
    return found


def cache() -> CacheStats:
    found = CacheStats(
        ram=CacheTierStats(block_count=10, size_bytes=MIB, limit_bytes=4 * MIB, evicted_block_total=5),
        ssd=CacheTierStats(block_count=20, size_bytes=2 * MIB, limit_bytes=8 * MIB),
        lookups=CacheLookupStats(ram_token_total=3000, ssd_token_total=1000, miss_token_total=1000),
        spill=CacheSpillStats(persisted_byte_total=100 * MIB, queue_bytes=1, queue_limit_bytes=4),
        promote=CachePromoteStats(read_byte_total=200 * MIB),
        disk=CacheDiskStats(
            block_bytes=69 * MIB, raw_block_bytes=100 * MIB, decompress_bytes_per_second=2.0 * GIB
        ),
    )
    found.ram.age.p50.FromSeconds(90)
    found.ssd.age.p50.FromSeconds(7200)
    for block_total in (4, 3):
        found.spill.drops.add(block_total=block_total)
    return found


def slow(request_id: str = "r1") -> SlowRequest:
    return SlowRequest(
        request_id=request_id,
        method="icehouse.v1.InferenceService/Stream",
        code="OK",
        age=duration_proto(12.0),
        total_duration=duration_proto(4.0),
        queue_duration=duration_proto(0.5),
        restore_duration=duration_proto(0.25),
        prefill_duration=duration_proto(1.25),
        decode_duration=duration_proto(2.0),
        prompt_tokens=1000,
        cached_tokens=768,
        output_tokens=21,
    )


def stats(seconds: int = 0, *slowest: SlowRequest, uptime_s: float = 100.0, **counts: int) -> ServerStats:
    """Return a look at a server after so many seconds."""
    found = ServerStats(
        engine=engine(uptime_s + seconds, **counts), cache=cache(), slowest_requests=slowest or (slow(),)
    )
    found.collect_time.FromSeconds(1000 + seconds)
    return found


def shown(
    found: ServerStats | None = None, rates: Rates | None = None, *, width: int = 120, **given: Any
) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    found = found or stats()
    settings = {"address": "host:1", "history": (1.0, 2.0), **given}
    console.print(screen(found, rates or rates_between(None, found), **settings))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_rank_of_a_group_has_a_line() -> None:
    found = stats()
    assert "rank" not in shown(found)
    ssd = RankTierStats(
        block_count=20,
        size_bytes=2 * MIB,
        written_byte_total=3 * MIB,
        read_byte_total=5 * MIB,
        dropped_block_total=1,
        evicted_block_total=2,
        damaged_block_total=4,
    )
    ready, lost = RankState.RANK_STATE_READY, RankState.RANK_STATE_GONE
    one = RankStats(rank=1, host="mac-b", state=lost, report_age=duration_proto(2.0), behind_order_count=1234)
    one.active_memory_bytes, one.memory_limit_bytes = 3 * GIB, 8 * GIB
    one.ssd.CopyFrom(ssd)
    one.ssd_trouble = "nothing is written:\nit is full"
    zero = RankStats(rank=0, host="mac-a", state=ready, active_memory_bytes=GIB)
    found.group.CopyFrom(GroupStats(rank_count=2, ranks=[zero, one]))
    lines = shown(found, width=140).splitlines()
    (first,) = [line for line in lines if "0 mac-a" in line]
    assert first.split() == ["0", "mac-a", "ready", "1", "GiB", "none"]
    (second,) = [line for line in lines if "1 mac-b" in line]
    assert " ".join(second.split()) == "1 mac-b gone 1,234 3 GiB 20 2 MiB 3 MiB 5 MiB 7"
    assert [line for line in lines if "rank 1: nothing is written" in line and "it is full" in line]


def test_rates_are_what_happened_between_two_looks() -> None:
    now = stats(2, finished_total=3, rejected_total=1, output_token_total=40, prefilled_token_total=10)
    now.cache.lookups.ram_token_total += 30
    now.cache.lookups.miss_token_total += 10
    now.cache.spill.persisted_byte_total += 64
    rates = rates_between(stats(), now)
    assert (rates.finished_per_s, rates.refused_per_s, rates.output_tokens_per_s) == (1.5, 0.5, 20.0)
    assert (rates.prefill_tokens_per_s, rates.written_bytes_per_s, rates.read_bytes_per_s) == (5.0, 32.0, 0.0)
    assert rates.hit_ratio == 0.75


def test_without_an_earlier_look_rates_are_since_the_start() -> None:
    rates = rates_between(None, stats())
    assert (rates.finished_per_s, rates.output_tokens_per_s, rates.hit_ratio) == (0.5, 20.0, 0.8)


def test_a_restart_between_two_looks_gives_no_negative_rates() -> None:
    rates = rates_between(stats(), stats(10, uptime_s=-6.0, finished_total=-48))
    assert rates.finished_per_s == 0.5


def test_no_prompt_between_two_looks_is_no_hit_ratio() -> None:
    assert rates_between(stats(), stats(1)).hit_ratio is None
    assert "(–)" in shown(rates=rates_between(stats(), stats(1)))


def test_the_screen_shows_queue_tiers_traffic_and_the_slowest() -> None:
    text = shown()
    for wanted in (
        *("4 of 16 decoding", "3 in prefill", "2 of 256 waiting", "20 written", "(80%)", "▄█", "34 ms"),
        *("1 MiB of 4 MiB", "2 h", "1,000 tokens", "spill 1 MiB/s", "restore 2 MiB/s", "25% full"),
        *("7 blocks not written", "r1", "4.00 s", "768/1,000 → 21"),
        *("files on SSD take 69% of their KV", "decompressed at 2 GiB/s"),
    ):
        assert wanted in text, wanted
    assert max(map(len, text.splitlines())) <= 100


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    full = stats(0, *[slow()] * 3)
    for tier in (full.cache.ram, full.cache.ssd):
        tier.size_bytes, tier.limit_bytes, tier.block_count = 1023 * GIB, 100 << 40, 123_456
    lines = shown(full, width=80).splitlines()
    tables = [line for line in lines if line.startswith(("tier", "RAM", "SSD", "slowest", "r1"))]
    assert len(tables) == 7 and "…" not in "".join(tables)


def test_a_stage_that_a_request_did_not_come_to_is_no_time() -> None:
    cut = slow("cut")
    cut.ClearField("decode_duration")
    cut.prefill_duration.FromSeconds(0)
    cut.restore_duration.FromSeconds(0)
    (line,) = [line for line in shown(stats(0, cut)).splitlines() if line.startswith("cut")]
    assert " ".join(line.split()).endswith("500 ms – 0 ms – 768/1,000 → 21")


def test_trouble_is_said() -> None:
    found = stats()
    found.cache.integrity.checksum_failure_total, found.cache.integrity.seal_failure_total = 2, 1
    found.cache.disk.writes_off_detail = "Disk is full"
    text = shown(found, notice="the server is away")
    assert "3 damaged" in text and "not writing to SSD: Disk is full" in text and "away" in text


def test_a_callers_name_cannot_command_the_terminal() -> None:
    text = shown(stats(0, slow("\x1b]0;owned\x07[red]")))
    assert "\x1b]0" not in text and "?]0;owned?[red]" in text


def test_a_tenant_sees_its_own_requests_and_why_not_more() -> None:
    text = shown(ServerStats(slowest_requests=[slow()]))
    assert "operator's token" in text and "r1" in text


@pytest.mark.parametrize(
    ("values", "drawn"), [((), ""), ((0.0, 0.0), ""), ((0.0, 4.0, 8.0), " ▄█"), ((8.0,), "█")]
)
def test_a_sparkline_is_as_high_as_its_values(values: tuple[float, ...], drawn: str) -> None:
    assert sparkline(values) == drawn


async def test_once_asks_a_real_server() -> None:
    async with running() as served:
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["top", "--once", "--address", served.server.address]
        )
    assert result.exit_code == 0, result.output
    assert "decoding" in result.output and served.server.address in result.output


async def test_a_server_that_goes_away_is_waited_for() -> None:
    def look(address: str, is_gone: asyncio.Event, stop: Any) -> list[str]:
        notices = []
        with open_client(address) as client:
            for _, notice in looks(Server(client, address), interval_s=0.1):
                notices.append(notice)
                if notice:
                    return notices
                if len(notices) == 1:
                    stop()
        return notices

    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    async with running() as served:
        looking = asyncio.create_task(
            asyncio.to_thread(
                look, served.server.address, asked, lambda: loop.call_soon_threadsafe(asked.set)
            )
        )
        async with asyncio.timeout(BOUND_S):
            await asked.wait()
    async with asyncio.timeout(BOUND_S):
        notices = await looking
    assert notices[0] == "" and "does not answer" in notices[-1]


def test_no_server_at_first_is_an_error_with_the_cure() -> None:
    result = CliRunner().invoke(app, ["top", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1 and "icehouse serve" in result.output


async def test_a_secured_server_is_asked_with_its_roots_and_a_token(tmp_path: Path) -> None:
    authority, token, tokens, roots = Authority(), new_token(), tmp_path / "tokens", tmp_path / "ca.pem"
    certificate, key = authority.write_server(tmp_path, "first")
    tokens.write_text(line_of(token, tenant="boss", role=CallerRole.OPERATOR, expire_date=None) + "\n")
    tokens.chmod(0o600)
    roots.write_bytes(authority.pem)
    (tmp_path / "own").write_text(f"{token}\n")
    security = SecurityConfig(tls_certificate=str(certificate), tls_key=str(key), token_file=str(tokens))
    async with running(security=security) as served:
        address = served.server.address.replace("127.0.0.1", "localhost")
        ask = ["top", "--once", "--address", address, "--ca", str(roots)]
        known = await asyncio.to_thread(CliRunner().invoke, app, [*ask, "--token", str(tmp_path / "own")])
        unknown = await asyncio.to_thread(CliRunner().invoke, app, ask)
    assert known.exit_code == 0 and "decoding" in known.output
    assert unknown.exit_code == 1
