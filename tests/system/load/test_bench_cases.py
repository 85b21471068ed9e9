"""What the bench of callers' waits makes of its times: ratios, percentiles, targets, phases of a step."""

from __future__ import annotations

import pytest

from bench import throughput
from bench.cases import beside, closed_loop, figure, kv_bits, memory, target, together
from bench.cases.figure import Figure, FigureKey, Side, Unit
from bench.cases.sizes import FULL, QUICK
from bench.cases.target import Grade
from bench.prompts import FreshPrompts
from bench.replies import Reply, gaps_inside, gaps_overlapping, measure
from bench.step import profile as step_profile


def reply(*token_times_s: float, start_time_s: float = 0.0, ids: tuple[int, ...] | None = None) -> Reply:
    return Reply(start_time_s, token_times_s, ids or tuple(range(len(token_times_s))))


def value_of(figures: list[Figure], name: str, side: Side = Side.NONE) -> float:
    (found,) = [f.value for f in figures if (f.key.name, f.key.side) == (name, side)]
    return found


def test_the_rate_counts_from_the_first_request_to_the_last_token() -> None:
    found = measure([reply(1.0, 2.0), reply(3.0, 4.0, start_time_s=1.5)])
    assert found.tokens_per_s == pytest.approx(4 / 4.0), "prompts included"
    assert found.ttft_worst_s == pytest.approx(1.5)
    assert found.ttft_p50_s == pytest.approx(1.25)


def test_each_side_is_compared_with_the_engine_of_its_own_round() -> None:
    figures = list(
        together.figures_of(
            "a case",
            {
                Side.ENGINE: [reply(1.0, 2.0), reply(1.0, 2.0)],
                Side.CACHE_ON: [reply(0.5, 4.0), reply(2.0, 4.0, ids=(7, 8))],
            },
        )
    )
    assert value_of(figures, figure.TOKENS_PER_S_RATIO, Side.CACHE_ON) == pytest.approx(0.5)
    assert value_of(figures, figure.WORST_TTFT_RATIO, Side.CACHE_ON) == pytest.approx(2.0)
    assert value_of(figures, figure.MEDIAN_TTFT_RATIO, Side.CACHE_ON) == pytest.approx(1.25)
    assert value_of(figures, together.EQUAL_REPLIES, Side.CACHE_ON) == pytest.approx(0.5)
    assert not [f for f in figures if f.key.side is Side.ENGINE and f.key.unit is Unit.RATIO]


def test_another_side_goes_first_each_turn() -> None:
    sides = (Side.ENGINE, Side.CACHE_OFF, Side.CACHE_ON)
    orders = [together.in_turn(sides, turn) for turn in range(3)]
    assert [order[0] for order in orders] == list(sides)
    assert all(set(order) == set(sides) for order in orders)


def test_gaps_of_a_stretch_are_those_inside_or_those_with_a_part_in_it() -> None:
    times = (0.0, 1.0, 3.0, 6.0, 10.0)
    assert gaps_inside(times, start_s=1.0, stop_s=6.0) == [2.0, 3.0]
    assert gaps_overlapping(times, start_s=2.0, stop_s=5.0) == [2.0, 3.0]
    assert gaps_overlapping(times, start_s=3.0, stop_s=6.0) == [3.0]


def test_beside_a_prefill_its_gaps_are_over_those_before_it() -> None:
    # One row begins late: until then nothing is decode alone. The prefill lasts from 10 to 14.
    rows = [
        [0.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.5, 15.0],
        [6.0, 7.0, 8.0, 9.0, 10.0, 12.5, 15.0],
    ]
    figures = beside.figures_of(rows, start_s=10.0, stop_s=14.0, prefill_alone_s=2.0)
    assert value_of(figures, figure.GAP_RATIO) == pytest.approx(2.5)
    assert value_of(figures, figure.PREFILL_TIME_RATIO) == pytest.approx(2.0)


def test_a_closed_loop_is_as_unequal_as_its_slowest_hundredth() -> None:
    figures = closed_loop.figures_of([1.0] * 100 + [9.0])
    assert value_of(figures, figure.TTFT_TAIL_RATIO) == pytest.approx(1.0)
    figures = closed_loop.figures_of([1.0] * 97 + [9.0] * 4)
    assert value_of(figures, figure.TTFT_TAIL_RATIO) == pytest.approx(9.0)


def test_memory_is_what_lies_above_the_weights() -> None:
    figures = memory.figures_of(peak_bytes=150, weight_bytes=50, kv_bytes=80)
    assert value_of(figures, figure.MEMORY_RATIO) == pytest.approx(1.25)


def test_quantized_kv_has_a_ratio_only_beside_a_baseline() -> None:
    assert value_of(
        kv_bits.figures_of({"this tree": 60.0, "baseline": 20.0}), figure.BASELINE_RATIO
    ) == pytest.approx(3.0)
    assert not target.judge(kv_bits.figures_of({"this tree": 60.0}))


@pytest.mark.parametrize(
    ("name", "case", "values", "grade"),
    [
        (figure.TOKENS_PER_S_RATIO, target.CROWD, (2.0, 2.1, 0.1), Grade.GOAL_MET),
        (figure.TOKENS_PER_S_RATIO, target.CROWD, (1.4,), Grade.MUST_MET),
        (figure.TOKENS_PER_S_RATIO, target.CROWD, (1.39, 1.39, 9.0), Grade.MISSED),
        (figure.WORST_TTFT_RATIO, target.CROWD, (0.4,), Grade.GOAL_MET),
        (figure.WORST_TTFT_RATIO, target.CROWD, (0.41, 0.69), Grade.MUST_MET),
        (figure.WORST_TTFT_RATIO, target.CROWD, (0.71,), Grade.MISSED),
    ],
)
def test_a_target_is_judged_by_the_median(
    name: str, case: str, values: tuple[float, ...], grade: Grade
) -> None:
    key = FigureKey(case, name, Side.CACHE_OFF)
    (result,) = target.judge([Figure(key, value) for value in values])
    assert result.grade is grade
    assert result.line.startswith(f"{case}, {name}, cache off: ")
    assert result.line.endswith(grade.value)


def test_each_side_is_judged_by_itself() -> None:
    keys = [FigureKey(target.LONE, figure.TOKENS_PER_S_RATIO, side) for side in Side]
    results = target.judge([Figure(keys[1], 1.0), Figure(keys[2], 0.5)])
    assert [(r.key.side, r.grade) for r in results] == [
        (Side.CACHE_OFF, Grade.GOAL_MET),
        (Side.CACHE_ON, Grade.MISSED),
    ]


def test_a_goal_asks_for_no_less_than_the_must() -> None:
    for each in target.TARGETS:
        assert each.grade(each.goal) is Grade.GOAL_MET, each
        assert each.grade(each.must) in (Grade.MUST_MET, Grade.GOAL_MET), each


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_every_target_of_arrivals_names_a_case_that_is_measured(sizes) -> None:
    arrivals = [*together.arrivals_of_clients(sizes), *together.arrivals_of_mixes(sizes)]
    named = {each.case for each in target.TARGETS if each.name == figure.TOKENS_PER_S_RATIO}
    missing = named - {each.case for each in arrivals}
    assert missing == ({target.CROWD} if sizes is QUICK else set())
    assert all(n > 0 for each in arrivals for n in each.prompt_token_counts)


def test_fresh_prompts_have_their_lengths_and_share_no_beginning_worth_keeping() -> None:
    source = FreshPrompts(range(100, 164), seed=1)
    prompts = source.take_each([40] * 64) + source.take_each([40] * 64)
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(prompts)
    assert FreshPrompts(range(100, 164), seed=1).take(40) == prompts[0], "a run can be repeated"


def test_no_round_begins_that_would_end_late_but_the_first_always_runs() -> None:
    assert throughput.fits_another_round(9999.0, 0, limit_s=60.0)
    assert throughput.fits_another_round(600.0, 1, limit_s=1200.0)
    assert not throughput.fits_another_round(601.0, 1, limit_s=1200.0)
    assert not throughput.fits_another_round(900.0, 2, limit_s=1200.0)


def test_a_profile_goes_to_the_phases_of_the_code_and_builtins_to_their_callers() -> None:
    plan = ("/x/service/icehouse_server/engine/scheduling/scheduler.py", 1, "plan")
    runner = ("/x/service/icehouse_server/engine/runner/runner.py", 1, "run")
    entries = {
        plan: (1, 1, 1.0, 9.0, {}),
        runner: (1, 1, 2.0, 9.0, {}),
        ("~", 0, "<built-in method len>"): (
            2,
            2,
            0.75,
            0.75,
            {plan: (1, 1, 0.5, 0.5), runner: (1, 1, 0.25, 0.25)},
        ),
    }
    found = step_profile.seconds_by_phase(entries)
    assert found == {step_profile.PLANNING: 1.5, step_profile.GRAPH: 2.25}


@pytest.mark.parametrize(
    ("file", "phase"),
    [
        ("/x/icehouse_server/engine/engine_loop.py", step_profile.LOOP),
        ("/x/icehouse_server/engine/core/sequence.py", step_profile.LOOP),
        ("/x/icehouse_server/engine/output.py", step_profile.PUBLISHING),
        ("/x/icehouse_server/engine/kv_cache/batching.py", step_profile.GRAPH),
        ("/y/site-packages/mlx/nn/layers/linear.py", step_profile.GRAPH),
        ("/y/site-packages/mlx_lm/models/llama.py", step_profile.GRAPH),
        ("/x/bench/step/profile.py", step_profile.DEVICE),
        ("/y/lib/python3.11/random.py", step_profile.OTHER),
    ],
)
def test_every_file_has_its_phase(file: str, phase: str) -> None:
    assert step_profile.phase_of(file) == phase
