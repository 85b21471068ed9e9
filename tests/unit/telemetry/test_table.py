"""The table of metrics: complete, well named, and what the endpoint gives out."""

from __future__ import annotations

import dataclasses
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from icehouse_server.domain.call import WireRecord
from icehouse_server.domain.events import CacheReport
from icehouse_server.domain.model import EngineState
from icehouse_server.domain.stats import StatsSnapshot
from icehouse_server.errors import StartError
from icehouse_server.telemetry.call_metrics import CALL_METRICS, FIRST_TOKEN_BY_REUSE, CallMetrics
from icehouse_server.telemetry.metric import Metric, MetricKind
from icehouse_server.telemetry.metrics_table import METRICS, OBSERVED_METRICS
from icehouse_server.telemetry.prometheus import PrometheusMeter, serve_metrics
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.patience import BOUND_S
from tests.fixtures.telemetry.facts import EMPTY, SNAPSHOT, USAGE, call_record

assert SNAPSHOT.group is not None
RANKS = SNAPSHOT.group.ranks
UNITS = {"s", "By", "By/s", "{token}/s", "1"}

# Numbers of the snapshots that no metric shows, and why.
NOT_SHOWN = {
    "prompt_token_total": "the sum of two kinds of icehouse.engine.tokens",
    "drafted_token_total": "the sum of both kinds of icehouse.engine.draft.tokens",
    "block_token_limit": "a setting",
    "tail_count": "of interest inside the cache only",
    "p90_s": "the median is enough for a graph",
    "p99_s": "the median is enough for a graph",
    "promoted_token_total": "icehouse.cache.reused.tokens of the ssd tier",
    "queue_count": "spill: shown in bytes",
    "queue_limit": "a constant of the reader pool",
    "restore_tokens_per_s": "weighed inside the cache",
    "recompute_tokens_per_s": "icehouse.engine.prefill.rate",
    "verified_block_total": "promoted blocks, once more",
    "quarantined_bytes": "part of icehouse.cache.disk.used",
    "manifest_bytes": "part of icehouse.cache.disk.used",
    "rank": "a label",
    "other_model_block_count": "a matter of `icehouse cache ls`",
}


def numbers_in(value: Any) -> Iterator[tuple[str, float]]:
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from numbers_in(inner)
        elif isinstance(inner, tuple):
            for item in inner:
                yield from numbers_in(item)
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            yield field.name, inner


def test_every_counter_of_the_engine_and_the_cache_is_a_metric_or_left_out_for_a_reason() -> None:
    shown = {value for row in OBSERVED_METRICS for _, value in row.read(SNAPSHOT)}
    missing = [
        name
        for part in (SNAPSHOT.engine, SNAPSHOT.cache, SNAPSHOT.kv_events, *SNAPSHOT.tenants, *RANKS)
        for name, value in numbers_in(part)
        if value not in shown and name not in NOT_SHOWN
    ]
    assert missing == []


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_names_units_and_descriptions_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", metric.name)
    assert metric.unit in UNITS or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    assert (metric.description.endswith(".") and metric.description[0].isupper()) or metric.description[
        0
    ] in "1"
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.prometheus_name)


def test_names_are_unique_in_both_spellings() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert len({metric.prometheus_name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize(
    ("name", "kind", "unit", "spelled"),
    [
        ("grpc.server.call.duration", MetricKind.HISTOGRAM, "s", "grpc_server_call_duration_seconds"),
        ("grpc.server.call.started", MetricKind.COUNTER, "{call}", "grpc_server_call_started_total"),
        ("a.evicted", MetricKind.COUNTER, "By", "a_evicted_bytes_total"),
        ("a.rate", MetricKind.GAUGE, "By/s", "a_rate_bytes_per_second"),
        ("a.rate", MetricKind.GAUGE, "{token}/s", "a_rate_per_second"),
        ("a.share", MetricKind.GAUGE, "1", "a_share_ratio"),
    ],
)
def test_prometheus_names_are_opentelemetrys_translation(
    name: str, kind: MetricKind, unit: str, spelled: str
) -> None:
    assert Metric(name, kind, unit, "D.").prometheus_name == spelled


@pytest.fixture
def scrape() -> Iterator[Any]:
    """Give a function that returns what an endpoint with calls and this snapshot answers."""
    endpoints = []

    def get(snapshot: StatsSnapshot) -> dict[str, Any]:
        meter = PrometheusMeter()
        calls = CallMetrics(meter)
        calls.call_started("a.B/C")
        calls.wire_ended(WireRecord("a.B/C", "OK", 0.5, 10, 20))
        calls.call_ended(call_record())
        calls.call_ended(call_record(code="UNAVAILABLE", reason="DRAINING", usage=None))
        endpoint = serve_metrics(meter, lambda: snapshot, host="127.0.0.1", port=0)
        endpoints.append(endpoint)
        with urllib.request.urlopen(f"{endpoint.url}metrics", timeout=BOUND_S) as answer:
            text = answer.read().decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    yield get
    for endpoint in endpoints:
        endpoint.stop()


def samples(family: Any) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels.values()): s.value for s in family.samples if not s.name.endswith("_created")}


def test_a_scrape_has_the_whole_table(scrape: Any) -> None:
    found = scrape(SNAPSHOT)
    wanted = {metric.prometheus_name.removesuffix("_total") for metric in METRICS}
    assert wanted <= set(found)
    ours = {name for name in found if not name.startswith("process_") and not name.endswith("_created")}
    assert ours == wanted
    assert samples(found["icehouse_engine_requests"]) == {
        ("waiting",): SNAPSHOT.engine.waiting_count,
        ("loading",): SNAPSHOT.engine.loading_count,
        ("prefilling",): SNAPSHOT.engine.prefilling_count,
        ("decoding",): SNAPSHOT.engine.decoding_count,
    }
    assert samples(found["icehouse_cache_size_bytes"])[("ssd",)] == SNAPSHOT.cache.ssd.size_bytes
    assert samples(found["icehouse_cache_disk_writable"]) == {(): 1}
    assert samples(found["icehouse_engine_state"])[("ready",)] == 1


def test_each_tenant_has_its_own_series(scrape: Any) -> None:
    found = scrape(SNAPSHOT)
    search, ads = SNAPSHOT.tenants
    assert samples(found["icehouse_tenant_requests"])[("running", "ads")] == ads.running_count
    assert samples(found["icehouse_tenant_tokens"])[("search", "cached")] == search.cached_token_total
    assert samples(found["icehouse_tenant_refused"]) == {
        ("search",): search.refused_total,
        ("ads",): ads.refused_total,
    }
    [share] = SNAPSHOT.cache.tenants
    assert samples(found["icehouse_tenant_stored_bytes"]) == {
        ("search", "ram"): share.ram_bytes,
        ("search", "ssd"): share.ssd_bytes,
    }


def test_each_rank_of_a_group_has_its_own_series(scrape: Any) -> None:
    found = scrape(SNAPSHOT)
    first, second = RANKS
    assert samples(found["icehouse_rank_memory_active_bytes"]) == {
        ("0",): first.active_memory_bytes,
        ("1",): second.active_memory_bytes,
    }
    states = {tuple(sorted(s.labels.items())): s.value for s in found["icehouse_rank_state"].samples}
    assert states[(("icehouse_rank", "1"), ("icehouse_state", "loading"))] == 1
    assert states[(("icehouse_rank", "1"), ("icehouse_state", "ready"))] == 0
    assert samples(found["icehouse_rank_report_age_seconds"]) == {("1",): 0.5}
    assert samples(found["icehouse_rank_ssd_sound"]) == {("0",): 1, ("1",): 0}
    assert first.ssd is not None
    assert samples(found["icehouse_rank_ssd_written_bytes"]) == {("0",): first.ssd.written_byte_total}


def test_without_a_group_there_are_no_ranks(scrape: Any) -> None:
    found = scrape(dataclasses.replace(SNAPSHOT, group=None))
    assert not [s for name, family in found.items() if "_rank_" in name for s in family.samples]


def test_each_of_several_models_has_its_own_series(scrape: Any) -> None:
    idle = dataclasses.replace(SNAPSHOT, state=EngineState.DRAINING)
    found = scrape(dataclasses.replace(SNAPSHOT, models={"one": SNAPSHOT, "two": idle}))
    states = {tuple(sorted(s.labels.items())): s.value for s in found["icehouse_engine_state"].samples}
    for name, state in (("one", "ready"), ("two", "draining")):
        assert states[(("icehouse_model", name), ("icehouse_state", state))] == 1
    assert all("icehouse_model" not in s.labels for s in found["icehouse_tenant_requests"].samples)
    assert not scrape(dataclasses.replace(SNAPSHOT, models={}))["icehouse_engine_running"].samples


def test_requests_are_counted_by_stage(scrape: Any) -> None:
    found = scrape(EMPTY)

    def total(name: str) -> float:
        return sum(s.value for s in found[name].samples if s.name == f"{name}_sum")

    assert total("gen_ai_server_time_to_first_token_seconds") == 2.0
    assert total("gen_ai_server_time_per_output_token_seconds") == pytest.approx(0.1)
    assert total("icehouse_request_queue_duration_seconds") == 0.5
    assert total("icehouse_request_restore_duration_seconds") == 0.5
    assert total("grpc_server_call_rcvd_total_compressed_message_size_bytes") == 20
    assert ("icehouse.v1.InferenceService/Stream", "UNAVAILABLE", "DRAINING") in samples(
        found["icehouse_call_errors"]
    )


@pytest.mark.parametrize(
    ("ram_count", "ssd_count", "reuse"), [(0, 0, "cold"), (3, 0, "ram"), (0, 3, "ssd"), (3, 3, "ssd")]
)
def test_the_first_token_is_timed_by_where_the_prompt_came_from(
    ram_count: int, ssd_count: int, reuse: str
) -> None:
    told: list[tuple[str, ...]] = []

    class Meter:
        def add(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
            pass

        def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
            if metric is FIRST_TOKEN_BY_REUSE:
                assert value == USAGE.ttft_s
                told.append(labels)

    cache = CacheReport(ram_token_count=ram_count, ssd_token_count=ssd_count)
    CallMetrics(Meter()).call_ended(call_record(usage=dataclasses.replace(USAGE, cache=cache)))
    assert told == [(reuse,)]


def test_a_request_is_timed_under_what_it_asked_for_and_why_it_failed(scrape: Any) -> None:
    found = scrape(EMPTY)["gen_ai_server_request_duration_seconds"].samples
    labels = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "error_type")
    sums = {tuple(s.labels[label] for label in labels): s.value for s in found if s.name.endswith("_sum")}
    assert sums == {("chat", "icehouse", "tiny", ""): 4.0, ("chat", "icehouse", "tiny", "DRAINING"): 4.125}
    first = scrape(EMPTY)["gen_ai_server_time_to_first_token_seconds"].samples
    assert {s.labels["gen_ai_operation_name"] for s in first} == {"chat"}


def test_a_call_that_asks_a_model_for_nothing_is_no_operation() -> None:
    told: list[str] = []

    class Meter:
        def add(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
            told.append(metric.name)

        observe = add

    CallMetrics(Meter()).call_ended(call_record(operation=None))
    assert told and not [name for name in told if name.startswith("gen_ai")]


def test_before_the_first_sample_there_are_no_made_up_zeros(scrape: Any) -> None:
    found = scrape(EMPTY)
    assert samples(found["icehouse_engine_requests"]) == {}
    assert samples(found["icehouse_cache_lookups"]) == {}
    assert samples(found["icehouse_engine_state"])[("loading",)] == 1


def test_a_taken_port_is_said_at_the_start() -> None:
    first = serve_metrics(PrometheusMeter(), lambda: EMPTY, host="127.0.0.1", port=0)
    port = first.server_port
    try:
        with pytest.raises(StartError, match=f"127.0.0.1:{port}.*--metrics-port"):
            serve_metrics(PrometheusMeter(), lambda: EMPTY, host="127.0.0.1", port=port)
    finally:
        first.stop()


def test_no_metric_is_counted_per_token_or_per_request_name() -> None:
    labels = {label for metric in CALL_METRICS for label in metric.labels}
    assert labels == {
        "grpc.method",
        "grpc.status",
        "icehouse.reason",
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "error.type",
        "icehouse.reuse",
    }
