"""The bench for GPUs runs on any machine, and judges what it measures by the table of its targets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases.figure import PREFILL_TIME_RATIO, TOKENS_PER_S_RATIO, WORST_TTFT_RATIO, Figure
from bench.cases.target import Grade, judge
from bench.gpu.callers import Heard
from bench.gpu.cases import BURSTS, ORDER, figures_beside, figures_of_burst
from bench.gpu.exact import judge_replies
from bench.gpu.passes import Pass, describe
from bench.gpu.targets import ALONE_GAP_RATIO, targets
from bench.replies import Reply
from bench.report import OUT
from bench.server_process import ROOT, child_environment
from tests.fixtures.patience import BOUND_S

TABLE = targets(pass_ms=7.0, load_s=5.0)


def value_of(figures: list[Figure], name: str) -> float:
    (found,) = [each.value for each in figures if each.key.name == name]
    return found


def test_a_burst_is_compared_with_the_engine() -> None:
    ours = [Reply(0.0, (1.0, 2.0), (1, 2)), Reply(0.0, (1.0, 2.0), (3, 4))]
    theirs = [Reply(0.0, (2.0, 8.0), (1, 2)), Reply(0.0, (4.0, 8.0), (3, 5))]
    found = figures_of_burst("64 clients", ours, theirs)
    assert value_of(found, TOKENS_PER_S_RATIO) == pytest.approx(4.0)
    assert value_of(found, WORST_TTFT_RATIO) == pytest.approx(0.25)
    assert value_of(found, "equal replies") == pytest.approx(0.5)
    assert [result.grade for result in judge(found, TABLE)] == [Grade.GOAL_MET, Grade.GOAL_MET]


def test_gaps_beside_a_prompt_are_over_those_alone() -> None:
    rows = [[0.0, 1.0, 2.0, 3.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0, 5.0, 7.0]]
    found = figures_beside(rows, start_s=3.0, stop_s=7.0, alone_s=2.0)
    assert value_of(found, ALONE_GAP_RATIO) == pytest.approx(2.0)
    assert value_of(found, PREFILL_TIME_RATIO) == pytest.approx(2.0)


def test_every_burst_with_a_target_is_measured_and_every_goal_asks_for_no_less_than_the_must() -> None:
    named = {burst.name for burst in BURSTS.values()}
    assert {target.case for target in TABLE if target.name == TOKENS_PER_S_RATIO} <= named
    assert ORDER[0] == "c64", "time on a GPU is short"
    for target in TABLE:
        assert target.grade(target.goal) is Grade.GOAL_MET, target
        assert target.grade(target.must) is not Grade.MISSED, target


def test_a_goal_that_was_not_measured_is_the_must() -> None:
    for target in targets(pass_ms=math.nan, load_s=math.nan):
        assert not math.isnan(target.goal), target


def test_a_reply_that_parts_from_the_engines_is_told_with_its_place_and_lead() -> None:
    alone = [[(5, 1.0), (6, 0.5), (7, 0.25)]]

    def heard(*ids: int) -> list[Heard]:
        return [Heard(Reply(0.0, tuple(map(float, range(len(ids)))), ids), 3)]

    assert judge_replies("RAM", heard(5, 6, 7), alone, [37]).differences == ()
    (told,) = judge_replies("RAM", heard(5, 6, 8), alone, [37]).differences
    assert "37" in told and "token 2" in told and "0.25" in told
    assert judge_replies("RAM", heard(5, 6), alone, [37]).differences, "a shorter reply is another one"


def test_passes_are_told_apart_by_whether_they_read_prompts() -> None:
    passes = [Pass(0.0, 0.002, 0.004, 8, ()), Pass(1.0, 0.01, 0.0, 8, (64, 64, 3))]
    alone, mixed, sums, lengths = describe(passes)
    assert alone.startswith("1 passes of rows alone: call p50 2.00") and "device p50 4.00" in alone
    assert mixed.startswith("1 passes with prompts: call p50 10.00")
    assert "131 to 131" in sums and "64 x 2" in lengths


@pytest.mark.slow
def test_a_look_at_it_on_this_machine_prints_every_target(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--shape", "tiny", "--dtype", "float32", "--scale", "0.05"]
    command += ["--rounds", "1", "--passes", "--scratch", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=2 * BOUND_S
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((OUT / "gpu.json").read_text(encoding="utf-8"))
    assert len(told["targets"]) == len(TABLE)
    assert done.stdout.count("equal to the engine alone") == 6
