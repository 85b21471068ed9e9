"""`icehouse bench` against a server that runs: each speed, what cannot be measured, and the limit."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from icehouse_client import Client
from icehouse_server.cli.local.bench import Speed, SpeedBench
from icehouse_server.cli.main import app
from icehouse_server.clock import SystemClock
from icehouse_server.domain.cache_commands import EvictBlocks, EvictReport, ListKnown
from icehouse_server.domain.request import CacheUse

from tests.fixtures.rpc.fake_engine import MODEL_INFO
from tests.fixtures.terminal import invoke
from tests.unit.rpc.conftest import running

LONG = dataclasses.replace(MODEL_INFO, context_token_limit=4096)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")


async def test_what_fits_is_measured_and_the_rest_says_why_not() -> None:
    async with running(info=LONG) as served:
        served.engine.order_answer = EvictReport()
        result = await invoke("bench", "--json", "--address", served.server.address, app=app)
        told = await invoke("bench", "--address", served.server.address, app=app)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["model"], facts["device"]) == ("tiny", "cpu")
    speeds = {speed["name"]: speed for speed in facts["speeds"]}
    assert list(speeds) == [
        *("prefill 512", "prefill 2,048", "decode, 1 row", "decode, 8 rows"),
        *("restore from RAM", "restore from SSD"),
    ]
    assert speeds["prefill 512"]["token_count"] == 512 and speeds["prefill 512"]["tokens_per_s"] > 0
    assert speeds["decode, 8 rows"]["token_count"] == 8 * speeds["decode, 1 row"]["token_count"]
    assert "icehouse bench MODEL" in speeds["restore from SSD"]["note"]
    assert "prefill 512" in told.stdout and "tokens/s" in told.stdout


async def test_nothing_measured_is_cached_before_and_what_is_kept_goes() -> None:
    async with running(info=LONG) as served:
        served.engine.order_answer = EvictReport()
        await invoke("bench", "--address", served.server.address, app=app)
    *measured, kept, again = served.engine.submitted
    assert {request.cache_use for request in measured} == {CacheUse.OFF}
    assert len({request.prompt_token_ids for request in measured}) == len(measured)
    assert kept.prompt_token_ids == again.prompt_token_ids
    assert [type(order) for order in served.engine.orders] == [ListKnown, EvictBlocks]
    assert served.engine.orders[0].prompt_token_ids == kept.prompt_token_ids


async def test_no_time_is_no_measurement_and_no_error() -> None:
    async with running(info=LONG) as served:

        def late() -> list[Speed]:
            with Client(served.server.address, watches_health=False) as client:
                bench = SpeedBench(client, clock=SystemClock(), limit_s=0.0)
                measures = (
                    lambda: bench.prefill(512),
                    lambda: bench.decode(8),
                    lambda: bench.restore(bench.fresh_prompt(512), tier="RAM"),
                )
                return [bench.speed("late", measure) for measure in measures]

        speeds = await asyncio.to_thread(late)
    assert all("--limit-s" in speed.note and speed.tokens_per_s is None for speed in speeds)
    assert served.engine.submitted == []


async def test_a_context_too_short_for_any_prompt_is_said() -> None:
    async with running(info=dataclasses.replace(MODEL_INFO, context_token_limit=128)) as served:
        result = await invoke("bench", "--json", "--address", served.server.address, app=app)
    assert result.exit_code == 0, result.output
    speeds = {speed["name"]: speed for speed in json.loads(result.stdout)["speeds"]}
    assert all("context" in speeds[name]["note"] for name in ("prefill 512", "restore from RAM"))
    assert speeds["decode, 8 rows"]["tokens_per_s"] > 0
    assert served.engine.orders == []
