"""The dashboard and the alert rules ask only for what the server exports, in a way that its kind allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import promql_parser as promql
import pytest
import yaml
from icehouse_server.config import SETTINGS
from icehouse_server.errors import Reason
from icehouse_server.telemetry.call_metrics import PromptReuse
from icehouse_server.telemetry.metric import Metric, MetricKind
from icehouse_server.telemetry.metrics_table import METRICS, OBSERVED_METRICS

from tests.fixtures.telemetry.facts import SNAPSHOT
from tests.fixtures.telemetry.metric_page import PAGE, page
from tests.tidy.tree import ROOT

FOLDER = ROOT / "deploy/observability"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "vllm-rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {"$__rate_interval": "5m", "$job": "icehouse", "$instance": "a"}

OF_THE_SCRAPE = {"job", "instance"}
SUFFIXES = {
    MetricKind.COUNTER: ("",),
    MetricKind.GAUGE: ("",),
    MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
SERIES: dict[str, Metric] = {m.prometheus_name + s: m for m in METRICS for s in SUFFIXES[m.kind]}
OVER_TIME = {"rate", "increase", "irate"}


def label_values() -> dict[tuple[str, str], set[str]]:
    """Return what each label of each observed metric may say, from a snapshot that has everything."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in OBSERVED_METRICS:
        for values, _ in row.read(SNAPSHOT):
            for label, value in zip(row.metric.prometheus_labels, values, strict=True):
                found.setdefault((row.metric.prometheus_name, label), set()).add(value)
    return found


VALUES = label_values()
VALUES["icehouse_request_first_token_duration_seconds_bucket", "icehouse_reuse"] = set(PromptReuse)


def panel_queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield f"{panel['title']}/{target['refId']}", expression


QUERIES = [*panel_queries(), *((rule["alert"], rule["expr"]) for rule in ALERTS)]


def selectors(
    node: Any, function: str = "", group: tuple[str, ...] = ()
) -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """Yield every selector of an expression with the function around it and the labels it is summed by."""
    match node:
        case promql.VectorSelector():
            yield node, function, group
        case promql.MatrixSelector():
            yield node.vector_selector, function, group
        case promql.Call():
            for argument in node.args:
                yield from selectors(argument, node.func.name, group)
        case promql.AggregateExpr():
            by = tuple(node.modifier.labels) if node.modifier is not None else ()
            yield from selectors(node.expr, function, group + by)
        case promql.BinaryExpr():
            yield from selectors(node.lhs, function, group)
            yield from selectors(node.rhs, function, group)
        case promql.ParenExpr() | promql.UnaryExpr():
            yield from selectors(node.expr, function, group)
        case promql.NumberLiteral():
            return
        case _:
            raise AssertionError(f"{type(node).__name__} is not looked into")


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[title for title, _ in QUERIES])
def test_a_query_asks_for_what_is_exported(title: str, expression: str) -> None:
    found = list(selectors(promql.parse(expression)))
    assert found
    for selector, function, group in found:
        if selector.name == "up":
            continue
        assert selector.name in SERIES, f"{title}: nobody exports {selector.name}"
        metric = SERIES[selector.name]
        labels = {*metric.prometheus_labels, *OF_THE_SCRAPE}
        if metric.kind is MetricKind.HISTOGRAM:
            labels.add("le")
        assert {m.name for m in selector.matchers.matchers} <= labels, title
        assert set(group) <= labels, title
        is_counted = metric.kind is not MetricKind.GAUGE
        assert (function in OVER_TIME) == is_counted, (
            f"{title}: {function or 'no function'} over a {metric.kind}"
        )


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[title for title, _ in QUERIES])
def test_a_query_matches_values_that_occur(title: str, expression: str) -> None:
    statuses, reasons = {code.name for code in grpc.StatusCode}, {reason.value for reason in Reason}
    for selector, _, _ in selectors(promql.parse(expression)):
        for matcher in selector.matchers.matchers:
            if matcher.name in OF_THE_SCRAPE or matcher.name == "grpc_method":
                continue
            known = {"grpc_status": statuses, "icehouse_reason": reasons}.get(matcher.name)
            if known is None or not selector.name.startswith(("grpc_", "icehouse_call_")):
                known = VALUES[selector.name, matcher.name]
            assert set(matcher.value.split("|")) <= known, f"{title}: {matcher.value}"


PICKER_GAUGES = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


def test_the_rules_rename_what_is_exported() -> None:
    names = [rule["record"] for rule in RECORDS]
    assert len(set(names)) == len(names) and set(names) >= PICKER_GAUGES
    for rule in RECORDS:
        for selector, _, left_out in selectors(promql.parse(rule["expr"])):
            metric = SERIES[selector.name]
            assert set(left_out) <= set(metric.prometheus_labels), rule["record"]
            is_counted = metric.kind is not MetricKind.GAUGE
            assert rule["record"].endswith(("_total", "_bucket")) is is_counted, rule["record"]
            for matcher in selector.matchers.matchers:
                known = VALUES[selector.name, matcher.name]
                assert set(matcher.value.split("|")) <= known, rule["record"]


def test_the_dashboard_hangs_together() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert all(label in target["expr"] or label in {"instance", "icehouse_state"} for label in shown)
    assert set(re.findall(r"\$(\w+)", json.dumps(PANELS))) <= {"__rate_interval", "job", "instance"}
    assert {"datasource", "job", "instance"} == {v["name"] for v in DASHBOARD["templating"]["list"]}


NOT_ON_THE_DASHBOARD = {"kv", "model", "replies"}


def family(name: str) -> str:
    """Return what a metric is of: "engine" of icehouse_engine_state, "cache_shared" of the object store's."""
    words = name.removeprefix("icehouse_").split("_")
    return "_".join(words[: 2 if words[:2] in (["cache", "shared"], ["cache", "sessions"]) else 1])


def test_the_dashboard_shows_something_of_everything_that_is_counted() -> None:
    shown = {selector.name for _, query in panel_queries() for selector, *_ in selectors(promql.parse(query))}
    missing = {family(metric.prometheus_name) for metric in METRICS} - {family(name) for name in shown}
    assert missing == NOT_ON_THE_DASHBOARD


def test_alerts_say_what_happened_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    flags = {setting.flag for setting in SETTINGS}
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        told = rule["annotations"]
        assert told["summary"].endswith(".") and told["action"].endswith("."), rule["alert"]
        assert set(re.findall(r"--[a-z-]+", told["action"])) <= flags, rule["alert"]
        assert "instance" in rule["expr"] or "sum by" not in rule["expr"] or "instance" not in told["summary"]


def test_the_flags_of_the_page_exist() -> None:
    told = set(re.findall(r"--[a-z-]+", (FOLDER / "README.md").read_text()))
    assert told and told <= {setting.flag for setting in SETTINGS}


def test_prometheus_is_told_of_the_rules() -> None:
    settings = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert settings["rule_files"] == ["alerts.yaml", "vllm-rules.yaml"]
    assert [job["job_name"] for job in settings["scrape_configs"]] == ["icehouse"]


def test_the_page_of_metrics_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.fixtures.telemetry.metric_page`"
