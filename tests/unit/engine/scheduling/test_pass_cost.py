"""What passes are expected to cost, from those before them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest
from icehouse_server.engine.scheduling.pass_cost import PassCost, PassCostLearner, PassSize
from icehouse_server.engine.scheduling.policy import POLICY


def taught(*chunks: tuple[int, int, float]) -> PassCostLearner:
    """Return a learner that saw chunks of (start, tokens, seconds)."""
    learner = PassCostLearner(POLICY)
    for start, token_count, elapsed_s in chunks:
        learner.note(PassSize.of_chunk(start, token_count), elapsed_s)
    return learner


def teach(
    learner: PassCostLearner, truth: PassCost, sizes: Sequence[PassSize], *, noise: float = 0.0
) -> None:
    dice = random.Random(7)
    for size in sizes:
        learner.note(size, truth.seconds(size) * (1.0 + noise * dice.uniform(-1.0, 1.0)))


def error(learner: PassCostLearner, truth: PassCost, size: PassSize) -> float:
    """Return by what share of the truth the expectation is off."""
    cost = learner.cost()
    assert cost is not None
    return abs(cost.seconds(size) / truth.seconds(size) - 1.0)


TRUTH = PassCost(fixed_s=0.020, token_s=0.001, score_s=2e-6)
VARIED = [PassSize.of_chunk(start, n) for start in (0, 300, 1000, 2500) for n in (4, 16, 64, 200)]


def test_nothing_is_expected_before_the_first_pass() -> None:
    learner = PassCostLearner(POLICY)
    assert learner.cost() is None and learner.trusted_tokens(0, budget_s=0.0) == 0.0


def test_sizes_add_up_to_that_of_one_pass() -> None:
    assert PassSize.of_chunk(10, 5) == PassSize(5, 75, read_count=15)
    assert PassSize.of_chunk(10, 5) + PassSize.of_chunk(99, 1) == PassSize(6, 175, read_count=115)
    assert PassSize.of_rows([9, 19]) == PassSize(2, 30, draw_count=2, read_count=30)


def test_passes_of_several_sizes_and_contexts_tell_the_three_parts_apart() -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED)
    cost = learner.cost()
    assert cost is not None
    assert cost.fixed_s == pytest.approx(TRUTH.fixed_s, rel=0.02)
    assert cost.token_s == pytest.approx(TRUTH.token_s, rel=0.02)
    assert cost.score_s == pytest.approx(TRUTH.score_s, rel=0.02)


def test_long_rows_that_are_read_do_not_make_chunks_look_dear() -> None:
    """As on a GPU: a row reads much and computes little, a chunk the other way round."""
    truth = PassCost(fixed_s=0.008, token_s=2e-5, score_s=1e-9, draw_s=1e-4, read_s=4e-8)
    learner = PassCostLearner(POLICY)
    rows = [PassSize.of_rows([count] * 8) for count in (100, 4000, 30_000)]
    chunks = [PassSize.of_chunk(start, n) for start in (0, 2000) for n in (64, 512)]
    teach(learner, truth, [*rows, *chunks, *(rows[2] + chunk for chunk in chunks)] * 2)
    assert error(learner, truth, rows[2] + PassSize.of_chunk(30_000, 512)) < 0.1


def test_noise_of_a_fifth_leaves_an_expectation_of_the_faster_passes() -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED * 3, noise=0.2)
    undisturbed = PassCost(*(0.9 * part for part in dataclasses.astuple(TRUTH)))
    for size in VARIED:
        assert error(learner, undisturbed, size) < 0.1, size


def test_costs_are_the_same_on_every_processor_to_the_last_bit() -> None:
    """The simulation's stories hang on them, and a seed is to give the same story everywhere."""
    truth = PassCost(fixed_s=0.008, token_s=2e-5, score_s=1e-9, draw_s=1e-4, read_s=4e-8)
    learner = PassCostLearner(POLICY)
    sizes = [size + PassSize.of_rows([100] * count) for count in (0, 3) for size in VARIED]
    teach(learner, truth, sizes * 3, noise=0.2)
    cost = learner.cost()
    assert cost is not None
    assert [part.hex() for part in dataclasses.astuple(cost)] == [
        "0x1.d2464d87f3925p-8",
        "0x1.406d6a0efa192p-16",
        "0x1.e05b726c44b7dp-31",
        "0x1.7a6a5e9dfa4c7p-14",
        "0x1.b0ea5bd9d05a4p-23",
        "0x0.0p+0",
    ]


GPU = PassCost(fixed_s=0.006, token_s=1.6e-5, score_s=1e-9, draw_s=5e-5)
CHUNKS = [PassSize.of_rows([100] * 16) + PassSize.of_chunk(0, count) for count in (16, 64, 256, 512, 2048)]
BUILT_S = 0.015


def host_bound() -> PassCostLearner:
    """Return what a device taught of which some passes end before the host has built the next one."""
    learner = PassCostLearner(POLICY)
    for _ in range(6):
        learner.note(PassSize.of_rows([100] * 16), 0.007)
        for size in CHUNKS:
            device_s = GPU.seconds(size)
            learner.note(size, max(BUILT_S, device_s), is_host_bound=device_s < BUILT_S)
    return learner


def test_passes_of_rows_and_a_chunk_take_the_host_s_time_or_the_device_s_if_that_is_longer() -> None:
    cost = host_bound().cost()
    assert cost is not None and cost.least_chunk_pass_s == BUILT_S
    assert cost.seconds(PassSize.of_rows([100] * 16)) == pytest.approx(0.007, rel=0.1)
    for size in CHUNKS:
        assert cost.seconds(size) == pytest.approx(max(BUILT_S, GPU.seconds(size)), rel=0.1)


def test_tokens_that_the_device_computes_while_the_host_builds_are_within_its_time() -> None:
    cost = host_bound().cost()
    assert cost is not None
    rows = PassSize.of_rows([100] * 16)
    assert cost.tokens_within(BUILT_S, 0, beside=rows) > 256
    assert cost.tokens_within(0.99 * BUILT_S, 0, beside=rows) == 0.0, "however few"


def test_a_pass_that_the_host_was_late_for_still_says_that_the_device_takes_no_longer() -> None:
    learner = taught((0, 64, 0.064), (0, 64, 0.064))
    size = PassSize.of_chunk(0, 2048)
    for _ in range(6):
        learner.note(size, 0.020, is_host_bound=True)
    cost = learner.cost()
    assert cost is not None and cost.device_s(size) <= 0.022


@pytest.mark.parametrize(("size", "elapsed_s"), [(CHUNKS[2], 0.012), (CHUNKS[0], 0.0072)])
def test_a_host_that_became_faster_is_believed(size: PassSize, elapsed_s: float) -> None:
    """Also if it takes less than half, which is a surprise."""
    learner = host_bound()
    for _ in range(6):
        learner.note(size, elapsed_s)
    cost = learner.cost()
    assert cost is not None and cost.least_chunk_pass_s == elapsed_s
    assert cost.seconds(size) == pytest.approx(elapsed_s, rel=0.1)


def test_passes_of_one_size_leave_it_open_what_is_fixed() -> None:
    cost = taught(*[(0, 16, 0.016)] * 3).cost()
    assert cost is not None and cost.seconds(PassSize.of_chunk(0, 16)) == pytest.approx(0.016, rel=0.01)
    assert 0.2 < cost.fixed_s / 0.016 < 0.8


def test_costs_are_never_negative() -> None:
    # Small passes that cost more than large ones.
    cost = taught((0, 4, 0.050), (0, 64, 0.020), (500, 64, 0.010)).cost()
    assert cost is not None and min(dataclasses.astuple(cost)) >= 0.0


def test_no_pass_takes_nothing() -> None:
    assert PassCost(0.0, 0.0, 0.0).seconds(PassSize(1, 1)) > 0.0, "rates divide by it"


def test_one_hiccup_changes_little() -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED)
    learner.note(VARIED[2], 50 * TRUTH.seconds(VARIED[2]))
    for size in VARIED:
        assert error(learner, TRUTH, size) < 0.1, size


def test_the_first_pass_of_its_size_that_takes_far_too_long_is_no_lesson_until_a_second_one_does() -> None:
    """A GPU compiles there, and no other pass of its size would tell."""
    learner, large = PassCostLearner(POLICY), PassSize.of_chunk(2500, 1000)
    teach(learner, TRUTH, VARIED)
    before = learner.cost()
    learner.note(large, 4.0 * TRUTH.seconds(large))
    assert learner.cost() == before
    learner.note(large, 4.0 * TRUTH.seconds(large))
    after = learner.cost()
    assert before is not None and after is not None and after.seconds(large) > before.seconds(large)


def test_a_busy_moment_of_the_machine_changes_little() -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED * 4)
    for size in VARIED[:3] * 3:
        learner.note(size, 3.0 * TRUTH.seconds(size))
    teach(learner, TRUTH, VARIED)
    for size in VARIED:
        assert error(learner, TRUTH, size) < 0.1, size


def test_long_passes_that_are_far_off_are_a_change_sooner() -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED * 4)
    now = PassCost(*(8.0 * part for part in dataclasses.astuple(TRUTH)))
    teach(learner, now, [VARIED[-1]] * 3)
    for size in VARIED:
        assert error(learner, now, size) < 0.1, size


@pytest.mark.parametrize("factor", [6.0, 1 / 6.0], ids=["slower", "faster"])
def test_a_device_that_changed_is_learned_in_a_dozen_passes(factor: float) -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED * 4)
    now = PassCost(*(factor * part for part in dataclasses.astuple(TRUTH)))
    teach(learner, now, VARIED[4:8] * 3)
    assert error(learner, now, VARIED[12]) < 0.1, "also of what did not run since"
    for size in VARIED[4:8]:
        assert error(learner, now, size) < 0.1, size


def test_a_slow_drift_is_followed() -> None:
    learner = PassCostLearner(POLICY)
    teach(learner, TRUTH, VARIED)
    now = PassCost(*(1.5 * part for part in dataclasses.astuple(TRUTH)))
    teach(learner, now, VARIED * 6)
    for size in VARIED:
        assert error(learner, now, size) < 0.05, size


def test_tiny_passes_without_end_do_not_crowd_out_what_a_long_one_taught_until_it_is_old() -> None:
    learner = PassCostLearner(POLICY)
    large = PassSize.of_chunk(1000, 256)
    teach(learner, TRUTH, [large] * 3)
    teach(learner, TRUTH, [PassSize.of_chunk(0, 4)] * 300)
    assert error(learner, TRUTH, large) < 0.1
    assert learner.trusted_tokens(0, budget_s=0.0) >= 256
    teach(learner, TRUTH, [PassSize.of_chunk(0, 4)] * 300)
    assert learner.trusted_tokens(0, budget_s=0.0) == 8


def test_a_fit_is_trusted_a_little_beyond_what_was_measured() -> None:
    learner = taught((0, 64, 0.1))
    assert learner.trusted_tokens(0, budget_s=0.0) == 128
    assert learner.trusted_tokens(0, budget_s=0.5) == 5 * 64, "so long even if nothing is fixed"
    at_long_context = learner.trusted_tokens(30_000, budget_s=0.5)
    assert at_long_context == pytest.approx(4 * 1024 * 64 / 30_000, rel=0.01)


def test_two_sizes_well_apart_tell_what_is_fixed() -> None:
    learner = taught((0, 8, 0.1), (0, 10, 0.1))
    assert (
        not learner.separates_fixed_cost(9)
        and learner.separates_fixed_cost(12)
        and learner.separates_fixed_cost(4)
    )
    learner.note(PassSize.of_chunk(0, 16), 0.1)
    assert learner.separates_fixed_cost(9)


def test_tokens_within_a_budget_take_just_that() -> None:
    for start in (0, 5000):
        count = TRUTH.tokens_within(0.5, start)
        assert TRUTH.fixed_s + count * (TRUTH.token_s + TRUTH.score_s * (start + count)) == pytest.approx(0.5)
    assert TRUTH.tokens_within(0.01, 0) == 0.0, "the fixed part alone takes longer"
    assert PassCost(0.0, 0.0, 0.0).tokens_within(0.1, 0) == math.inf


@pytest.mark.parametrize("start", [0, 3000])
@pytest.mark.parametrize("score_s", [0.0, 2e-6])
def test_tokens_at_a_share_of_the_best_rate_are_the_fewest_that_reach_it(start: int, score_s: float) -> None:
    cost = PassCost(0.020, 0.001, score_s)

    def rate(count: int) -> float:
        return count / cost.seconds(PassSize.of_chunk(start, count))

    best = max(rate(count) for count in range(1, 1001))
    fewest = cost.tokens_at_rate(0.95, start, limit=1000)
    assert rate(math.ceil(fewest)) >= 0.949 * best
    assert rate(math.floor(fewest) - 1) < 0.95 * best


def test_where_all_is_fixed_longer_is_always_better() -> None:
    assert PassCost(0.1, 0.0, 0.0).tokens_at_rate(0.95, 0, limit=math.inf) == math.inf
    assert PassCost(0.1, 0.0, 0.0).tokens_at_rate(0.95, 0, limit=100) == pytest.approx(95)
    assert PassCost(0.0, 0.1, 0.0).tokens_at_rate(0.95, 0, limit=100) == 1


@pytest.mark.parametrize(
    "passes",
    [
        [((2, 120, 2), 0.009025), ((6, 6, 6), 0.04057), ((16, 480, 1), 0.0003726), ((1, 30, 0), 0.0001265)],
        [((1, 1, 0), 5.4e-9), ((2, 2, 2), 0.0908), ((16, 960, 0), 0.0230), ((4, 8, 1), 0.0)],
    ],
    ids=["nothing but draws costs anything", "times many orders apart"],
)
def test_what_cannot_be_true_is_fitted_all_the_same(passes: list[tuple[tuple[int, int, int], float]]) -> None:
    learner = PassCostLearner(POLICY)
    for size, elapsed_s in passes * 3:
        learner.note(PassSize(*size), elapsed_s)
        cost = learner.cost()
        assert cost is not None and cost.seconds(PassSize(1000, 10_000, 1)) >= 0.0
