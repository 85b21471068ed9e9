"""Quantiles and moving averages: one definition each."""

from __future__ import annotations

import math
import random

import pytest
from icehouse_server.averages import MovingAverage, quantile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([5.0], 0.5, 5.0),
        ([5.0], 0.99, 5.0),
        ([3.0, 1.0], 0.5, 3.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        (range(100), 0.9, 90.0),
        (range(100), 0.0, 0.0),
        (range(100), 1.0, 99.0),
    ],
)
def test_a_quantile_is_one_of_the_values(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


def test_the_first_sample_counts_whole_and_the_next_ones_by_their_weight() -> None:
    average = MovingAverage(weight=0.25)
    assert average.value == 0.0
    assert [average.add(8.0), average.add(4.0), average.add(7.0)] == [8.0, 7.0, 7.0]
    assert average.value == 7.0


def test_a_rate_weighs_by_how_long_it_was_kept_up() -> None:
    rate = MovingAverage()
    assert rate.add_rate(0, elapsed_s=1.0) == rate.add_rate(5, elapsed_s=0.0) == 0.0
    assert rate.add_rate(100, elapsed_s=0.5) == 200.0
    assert rate.add_rate(500, elapsed_s=5.0) == pytest.approx(100.0 + 100.0 / math.e)


def test_a_rate_is_the_same_on_every_processor_to_the_last_bit() -> None:
    """Rates decide which prompts are refused; libm's exponential differs between processors."""
    rate, dice = MovingAverage(), random.Random(3)
    for _ in range(500):
        rate.add_rate(dice.uniform(1.0, 9.0), elapsed_s=dice.uniform(0.001, 3.0))
    rate.add_rate(7.0, elapsed_s=0.25)
    assert rate.value.hex() == "0x1.424b8b0743617p+2"
    rate.add_rate(90.0, elapsed_s=90_000.0)
    assert rate.value == pytest.approx(0.001)
