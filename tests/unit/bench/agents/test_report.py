"""The bench from its command line to its files, on a small generated trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import plots
from bench import report as bench_report
from bench.agents import __main__ as command
from bench.agents.rules import Rule


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (command, bench_report, plots):
        monkeypatch.setattr(module, "OUT", tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr("sys.argv", ["agents", *flags])
    command.main()


def test_tables_json_and_plot_have_every_rule_at_every_size(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--requests", "400", "--rounds", "2", "--sizes", "0.05", "--budgets", "3")
    found = json.loads((out / "agents.json").read_text(encoding="utf-8"))
    rates = {
        (each["rule"], each["share"]): each["ram_hit_rate"] + each["ssd_hit_rate"] for each in found["blocks"]
    }
    assert rates.keys() == {*((rule.value, 0.05) for rule in Rule), (Rule.LRU.value, 1.0)}
    assert rates[Rule.LRU.value, 0.05] < rates[Rule.BELADY.value, 0.05] <= rates[Rule.LRU.value, 1.0]
    rules = [(each["rule"], each["share"]) for each in found["checkpoints"]]
    assert len(rules) == 2 * len(set(rules)) == 2 * 2 * 10, "two rounds, two sizes, ten rules"
    assert ("budget 3, gap / age, branches, ended dropped", 0.05) in rules
    assert (out / "agents.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert "400 requests" in said and "a cache of 5.0%" in said and "a cache of everything" in said


def test_one_part_alone_is_reported(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--requests", "200", "--parts", "blocks", "--sizes", "0.1")
    found = json.loads((out / "agents.json").read_text(encoding="utf-8"))
    assert found["checkpoints"] == [] and len(found["blocks"]) == len(Rule) + 1
