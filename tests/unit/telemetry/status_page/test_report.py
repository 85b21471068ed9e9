"""The report: what it tells, and what it never does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from icehouse_server.domain.cache_commands import RecentBlock
from icehouse_server.domain.ids import BlockHash, Tenant
from icehouse_server.domain.stats import ServerStatus, SlowRequest, StatsSnapshot, TenantUse
from icehouse_server.telemetry.metric import HistogramSeries
from icehouse_server.telemetry.status_page.page import TENANT_LIMIT, ReportRules, report_of

from tests.fixtures.telemetry.facts import EMPTY, SNAPSHOT

RULES = ReportRules(version="1.2.3", shows_request_ids=True, name_key=b"k" * 32)
NAME = BlockHash(bytes(range(32)))
BLOCK = RecentBlock(NAME, BlockHash(b"root"), 0, 256, 3, is_in_ram=True, is_on_ssd=False)
SLOW = SlowRequest(
    request_id="r1",
    method="icehouse.v1.InferenceService/Generate",
    code="OK",
    age_s=1.5,
    total_duration_s=4.0,
    queue_duration_s=0.5,
    restore_duration_s=0.25,
    prefill_duration_s=None,
    decode_duration_s=None,
    prompt_token_count=10,
    cached_token_count=5,
    output_token_count=0,
)


def told(snapshot: StatsSnapshot = SNAPSHOT, *, rules: ReportRules = RULES, **changes: Any) -> dict[str, Any]:
    status = ServerStatus(
        **{
            "collect_time": 1000.0,
            "snapshot": snapshot,
            "slowest_requests": (SLOW,),
            "recent_blocks": (BLOCK,),
            **changes,
        }
    )
    series = HistogramSeries(("ram",), (0.1, 1.0), (1, 3, 4))
    report: dict[str, Any] = json.loads(
        json.dumps(report_of(status, (series,), rules=rules), allow_nan=False)
    )
    return report


def test_it_tells_the_counters() -> None:
    report = told()
    engine, cache = SNAPSHOT.engine, SNAPSHOT.cache
    assert engine is not None and cache is not None and cache.ssd is not None
    assert (report["version"], report["state"], report["collect_time"]) == ("1.2.3", "ready", 1000.0)
    assert report["engine"]["waiting_count"] == engine.waiting_count
    assert report["cache"]["ram"]["size_bytes"] == cache.ram.size_bytes
    assert report["cache"]["ssd"]["block_count"] == cache.ssd.block_count
    assert report["cache"]["miss_token_total"] == cache.lookups.miss_token_total
    assert report["first_token"] == [
        {"reuse": "ram", "count": 4, "p50_s": 0.55, "p90_s": 1.0, "bounds_s": [0.1, 1.0], "counts": [1, 2, 1]}
    ]
    assert report["slowest_requests"] == [dataclasses.asdict(SLOW)]


def test_before_the_engine_has_told_anything_there_is_nothing_to_tell() -> None:
    report = told(EMPTY, recent_blocks=None, slowest_requests=())
    assert (report["state"], report["model"], report["engine"], report["cache"]) == (
        "loading",
        None,
        None,
        None,
    )
    assert report["prefixes"] is None and report["tenants"] == []


def test_a_prefix_is_told_with_where_its_blocks_are_and_what_they_saved() -> None:
    after = dataclasses.replace(
        BLOCK, hash=BlockHash(b"after"), parent=NAME, start_token_index=256, is_on_ssd=True, is_in_ram=False
    )
    unused = dataclasses.replace(after, hash=BlockHash(b"x"), parent=after.hash, hit_count=0)
    [top] = told(recent_blocks=(after, BLOCK, unused))["prefixes"]
    assert (top["start_token_index"], top["end_token_index"]) == (0, 512)
    assert (top["block_count"], top["ram_block_count"], top["ssd_block_count"]) == (2, 1, 1)
    assert (top["hit_count"], top["reused_token_total"], top["branch_count"]) == (3, 2 * 256 * 3, 1)


def test_a_name_of_a_block_proves_no_guess_of_its_tokens() -> None:
    [prefix] = told()["prefixes"]
    assert (prefix["end_token_index"], prefix["hit_count"]) == (256, 3)
    assert prefix["name"] not in NAME.hex()
    [other] = told(rules=dataclasses.replace(RULES, name_key=b"other"))["prefixes"]
    assert other["name"] != prefix["name"]
    assert b"k" * 32 not in repr(RULES).encode()


def test_ids_of_requests_are_left_out_where_callers_prove_who_they_are() -> None:
    [slow] = told(rules=dataclasses.replace(RULES, shows_request_ids=False))["slowest_requests"]
    assert (slow["request_id"], slow["total_duration_s"]) == ("", 4.0)


def test_ranks_of_a_group_are_told_without_their_names() -> None:
    first, second = told()["ranks"]
    assert SNAPSHOT.group is not None and SNAPSHOT.group.ranks[0].ssd is not None
    assert (first["rank"], first["state"], first["has_ssd_trouble"]) == (0, "ready", False)
    assert first["ssd"]["block_count"] == SNAPSHOT.group.ranks[0].ssd.block_count
    assert (second["rank"], second["state"], second["has_ssd_trouble"]) == (1, "loading", True)
    assert second["ssd"] is None and "host" not in second and "It hangs" not in json.dumps(second)
    assert told(EMPTY)["ranks"] == []


def test_tenants_are_those_of_the_metrics_and_no_more_than_fit() -> None:
    stored = {each["tenant"]: each["ram_bytes"] for each in told()["tenants"]}
    [share] = SNAPSHOT.cache.tenants
    assert stored == {"search": share.ram_bytes, "ads": 0}
    many = tuple(TenantUse(Tenant(f"t{i}"), prompt_token_total=i) for i in range(3 * TENANT_LIMIT))
    report = told(dataclasses.replace(SNAPSHOT, tenants=many))
    assert report["tenant_count"] == 3 * TENANT_LIMIT
    assert [each["tenant"] for each in report["tenants"]][:2] == ["t59", "t58"]
    assert len(report["tenants"]) == TENANT_LIMIT


def test_no_text_is_told_without_a_way_to_read_it_whatever_the_blocks_bring() -> None:
    spelled = dataclasses.replace(BLOCK, token_keys=tuple(b"hush"))
    report = told(recent_blocks=(spelled,))
    assert report == told() and "text" not in report["prefixes"][0] and report["shows_text"] is False


def test_the_text_of_a_prefix_is_told_where_the_rules_can_read_it_and_its_tokens_are_known() -> None:
    rules = dataclasses.replace(RULES, decode=lambda token_ids: bytes(token_ids).decode())
    below = RecentBlock(BlockHash(b"below"), NAME, 256, 256, 1, is_in_ram=False, is_on_ssd=True)
    begun = dataclasses.replace(BLOCK, token_keys=tuple(b"<b>\nhush</b>"))
    report = told(recent_blocks=(begun, below), rules=rules)
    [top] = report["prefixes"]
    assert report["shows_text"] is True and top["text"] == "<b> hush</b>…"
    assert [child["text"] for child in top["children"]] == [None]


def test_a_text_that_is_shown_whole_has_no_ellipsis() -> None:
    rules = dataclasses.replace(RULES, decode=lambda token_ids: bytes(token_ids).decode())
    short = dataclasses.replace(BLOCK, token_keys=tuple(b"hush"), token_count=4)
    [top] = told(recent_blocks=(short,), rules=rules)["prefixes"]
    assert top["text"] == "hush"
