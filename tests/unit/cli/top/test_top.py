"""`icehouse top`: what is shown of a server, the rates between two looks, and a server that goes away."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.cli.client import top
from icehouse_server.cli.client.connection import open_client
from icehouse_server.cli.main import app
from icehouse_server.cli.terminal.client_options import Target
from icehouse_server.cli.top.rates import Rates, rates_between
from icehouse_server.cli.top.view import duration_text, screen, sparkline
from icehouse_server.config import SecurityConfig
from icehouse_server.domain.cache_stats import (
    AgePercentiles,
    CacheStats,
    DiskStats,
    IntegrityStats,
    LookupStats,
    MissTokens,
    PromoteStats,
    SpillDropCause,
    SpillDrops,
    SpillStats,
    TierStats,
)
from icehouse_server.domain.events import ReuseLimit
from icehouse_server.domain.stats import EngineStats, ServerStats, SlowRequest
from icehouse_server.rpc.access.caller import Role
from icehouse_server.rpc.access.tokens import line_of, new_token
from rich.console import Console
from typer.testing import CliRunner

from tests.fixtures.patience import BOUND_S
from tests.fixtures.rpc.authority import Authority
from tests.unit.rpc.conftest import running

ENGINE = EngineStats(
    uptime_s=100.0,
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
    decode_step_p50_s=0.034,
    decode_step_p99_s=2.5,
    active_memory_bytes=3 << 30,
    memory_limit_bytes=8 << 30,
)
RAM = TierStats(
    block_count=10,
    size_bytes=1 << 20,
    limit_bytes=4 << 20,
    evicted_block_total=5,
    age=AgePercentiles(p50_s=90.0),
)
SSD = TierStats(block_count=20, size_bytes=2 << 20, limit_bytes=8 << 20, age=AgePercentiles(p50_s=7200.0))
CACHE = CacheStats(
    ram=RAM,
    ssd=SSD,
    lookups=LookupStats(
        ram_token_total=3000, ssd_token_total=1000, miss_tokens=(MissTokens(ReuseLimit.NO_MATCH, 1000),)
    ),
    spill=SpillStats(
        persisted_byte_total=100 << 20,
        queue_bytes=1,
        queue_limit_bytes=4,
        drops=(SpillDrops(SpillDropCause.NO_CREDIT, 4), SpillDrops(SpillDropCause.DUPLICATE, 3)),
    ),
    promote=PromoteStats(read_byte_total=200 << 20),
)
SLOW = SlowRequest(
    request_id="r1",
    method="icehouse.v1.InferenceService/Stream",
    code="OK",
    age_s=12.0,
    total_duration_s=4.0,
    queue_duration_s=0.5,
    restore_duration_s=0.25,
    prefill_duration_s=1.25,
    decode_duration_s=2.0,
    prompt_token_count=1000,
    cached_token_count=768,
    output_token_count=21,
)
STATS = ServerStats(collect_time=1000.0, engine=ENGINE, cache=CACHE, slowest_requests=(SLOW,))


def shown(stats: ServerStats = STATS, rates: Rates | None = None, *, width: int = 120, **given: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    settings = {"address": "host:1", "history": (1.0, 2.0), **given}
    console.print(screen(stats, rates or rates_between(None, stats), **settings))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def later(seconds: float, **engine: int) -> ServerStats:
    grown = {name: getattr(ENGINE, name) + count for name, count in engine.items()}
    moved = dataclasses.replace(ENGINE, uptime_s=ENGINE.uptime_s + seconds, **grown)
    return dataclasses.replace(STATS, collect_time=STATS.collect_time + seconds, engine=moved)


def test_rates_are_what_happened_between_two_looks() -> None:
    now = later(2.0, finished_total=3, rejected_total=1, output_token_total=40, prefilled_token_total=10)
    lookups = dataclasses.replace(
        CACHE.lookups, ram_token_total=3030, miss_tokens=(MissTokens(ReuseLimit.NO_MATCH, 1010),)
    )
    spill = dataclasses.replace(CACHE.spill, persisted_byte_total=CACHE.spill.persisted_byte_total + 64)
    cache = dataclasses.replace(CACHE, lookups=lookups, spill=spill)
    rates = rates_between(STATS, dataclasses.replace(now, cache=cache))
    assert (rates.finished_per_s, rates.refused_per_s, rates.output_tokens_per_s) == (1.5, 0.5, 20.0)
    assert (rates.prefill_tokens_per_s, rates.written_bytes_per_s, rates.read_bytes_per_s) == (5.0, 32.0, 0.0)
    assert rates.hit_ratio == 0.75


def test_without_an_earlier_look_rates_are_since_the_start() -> None:
    rates = rates_between(None, STATS)
    assert (rates.finished_per_s, rates.output_tokens_per_s, rates.hit_ratio) == (0.5, 20.0, 0.8)


def test_a_restart_between_two_looks_gives_no_negative_rates() -> None:
    fresh = dataclasses.replace(ENGINE, uptime_s=4.0, finished_total=2)
    rates = rates_between(STATS, dataclasses.replace(STATS, collect_time=1010.0, engine=fresh))
    assert rates.finished_per_s == 0.5


def test_no_prompt_between_two_looks_is_no_hit_ratio() -> None:
    assert rates_between(STATS, later(1.0)).hit_ratio is None
    assert "(–)" in shown(rates=rates_between(STATS, later(1.0)))


def test_the_screen_shows_queue_tiers_traffic_and_the_slowest() -> None:
    text = shown()
    for wanted in (
        *("4 of 16 decoding", "3 in prefill", "2 of 256 waiting", "20 written", "(80%)", "▄█", "34 ms"),
        *(
            "1 MiB of 4 MiB",
            "2 h",
            "1,000 tokens",
            "spill 1 MiB/s",
            "restore 2 MiB/s",
            "25% full",
            "7 blocks not written",
        ),
        *("r1", "4.00 s", "768/1,000 → 21"),
    ):
        assert wanted in text, wanted
    assert max(map(len, text.splitlines())) <= 100


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    large = 100 << 40
    full = {"size_bytes": 1023 << 30, "limit_bytes": large, "block_count": 123_456}
    cache = dataclasses.replace(
        CACHE, ram=dataclasses.replace(RAM, **full), ssd=dataclasses.replace(SSD, **full)
    )
    stats = dataclasses.replace(STATS, cache=cache, slowest_requests=(SLOW,) * 3)
    lines = shown(stats, width=80).splitlines()
    tables = [line for line in lines if line.startswith(("tier", "RAM", "SSD", "slowest", "r1"))]
    assert len(tables) == 7 and "…" not in "".join(tables)


def test_trouble_is_said() -> None:
    cache = dataclasses.replace(
        CACHE,
        integrity=IntegrityStats(checksum_failure_total=2, seal_failure_total=1),
        disk=DiskStats(writes_off_detail="Disk is full"),
    )
    text = shown(dataclasses.replace(STATS, cache=cache), notice="the server is away")
    assert "3 damaged" in text and "nothing is written: Disk is full" in text and "away" in text


def test_a_callers_name_cannot_command_the_terminal() -> None:
    slow = dataclasses.replace(SLOW, request_id="\x1b]0;owned\x07[red]")
    text = shown(dataclasses.replace(STATS, slowest_requests=(slow,)))
    assert "\x1b]0" not in text and "?]0;owned?[red]" in text


def test_a_tenant_sees_its_own_requests_and_why_not_more() -> None:
    text = shown(ServerStats(1.0, slowest_requests=(SLOW,)))
    assert "operator's token" in text and "r1" in text


@pytest.mark.parametrize(
    ("values", "drawn"), [((), ""), ((0.0, 0.0), ""), ((0.0, 4.0, 8.0), " ▄█"), ((8.0,), "█")]
)
def test_a_sparkline_is_as_high_as_its_values(values: tuple[float, ...], drawn: str) -> None:
    assert sparkline(values) == drawn


def test_durations_are_for_people() -> None:
    assert [duration_text(s) for s in (None, 0.0004, 0.25, 2.345, 600)] == [
        "–",
        "0 ms",
        "250 ms",
        "2.35 s",
        "10 min",
    ]


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
        with open_client(Target(address)) as client:
            for _, notice in top._looks(client, address, interval_s=0.1):
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
    assert notices[0] == "" and "is away" in notices[-1]


def test_no_server_at_first_is_an_error_with_the_cure() -> None:
    result = CliRunner().invoke(app, ["top", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1 and "icehouse serve" in result.output


async def test_a_secured_server_is_asked_with_its_roots_and_a_token(tmp_path: Path) -> None:
    authority, token, tokens, roots = Authority(), new_token(), tmp_path / "tokens", tmp_path / "ca.pem"
    certificate, key = authority.write_server(tmp_path, "first")
    tokens.write_text(line_of(token, tenant="boss", role=Role.OPERATOR, expire_date=None) + "\n")
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
