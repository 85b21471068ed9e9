"""The scenarios that every client runs: their file is well formed, and no empty cell goes unnoticed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from protos import generate
from tests.system.clients import scenarios
from tests.system.clients.languages import LANGUAGES
from tests.system.clients.live_servers import Servers
from tests.system.clients.oldest import floors
from tests.system.clients.scenarios import (
    Result,
    faults_of,
    read_results,
    scenario_names,
    table_of,
    unserved,
)

NAMES = ("unary", "stream")


def test_every_scenario_says_what_happens_where_and_what_must_be_true() -> None:
    found = json.loads(scenarios.SCENARIOS_PATH.read_text(encoding="utf-8"))
    servers = {field.name for field in dataclasses.fields(Servers)}
    for name, scenario in found.items():
        assert name.isidentifier() and name.islower()
        assert set(scenario) == {"about", "server", "input", "expect"}, name
        assert scenario["about"].endswith(".") and scenario["server"] in servers, name
    assert scenario_names() == tuple(found)


def test_scenarios_of_a_server_that_could_not_be_started_are_left_out() -> None:
    servers = {field.name: "somewhere" for field in dataclasses.fields(Servers)}
    assert unserved(servers) == ()
    assert unserved({**servers, "vision_address": ""}) == ("images", "broken_image")


def test_the_columns_are_clients() -> None:
    names = [language.name for language in LANGUAGES]
    assert set(scenarios.NOT_YET) <= set(names) and len(set(names)) == len(names)


def test_the_floors_of_what_callers_install_are_what_is_tried() -> None:
    """They agree with each other and with what made the messages."""
    made = generate.PYTHON_PROTOC.partition("==")[2]
    assert floors()["grpcio"] == floors()["grpcio-health-checking"] == made
    messages = (generate.OUTPUT_DIR / "python/icehouse/v1/usage_pb2.py").read_text(encoding="utf-8")
    assert f"# Protobuf Python Version: {floors()['protobuf']}\n" in messages


def test_a_full_table_has_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"scenario": "unary", "passed": true}\n{"scenario": "stream", "passed": true}\n')
    results = {"go": read_results(path)}
    assert faults_of(NAMES, results) == []
    assert table_of(NAMES, results).splitlines() == ["        go", "unary   ok", "stream  ok"]
    results = {"go-oldest": results["go"], "java": results["go"]}
    rows = ["        go-oldest  java", "unary   ok         ok", "stream  ok         ok"]
    assert table_of(NAMES, results).splitlines() == rows


def test_a_failure_an_unknown_name_and_an_empty_cell_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "NOT_YET", ("java",))
    results = {
        "go": [Result("unary", False), Result("unary", True), Result("other", True)],
        "java": [],
    }
    assert faults_of(NAMES, results) == [
        "go: unary failed",
        "go: other is no scenario",
        "go: stream was not run",
    ]
    assert table_of(NAMES, results).splitlines()[1:] == ["unary   FAIL", "stream"]


def test_what_a_client_has_no_way_for_is_no_fault_and_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "NOT_OFFERED", {"http": ("stream",)})
    results = {"http": [Result("unary", True)], "go": [Result("unary", True)]}
    assert faults_of(NAMES, results) == ["go: stream was not run"]
    assert table_of(NAMES, results).splitlines()[1:] == ["unary   ok      ok", "stream  -"]


def test_what_a_client_has_no_way_for_are_scenarios_of_clients() -> None:
    assert {language.name for language in LANGUAGES} >= set(scenarios.NOT_OFFERED)
    for names in scenarios.NOT_OFFERED.values():
        assert set(names) <= set(scenario_names()) and len(set(names)) == len(names)


def test_no_results_are_an_empty_column(tmp_path: Path) -> None:
    assert read_results(tmp_path / "none") == ()
