"""Figures for people: sizes, durations and ages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse_client.cli.figures import age_text, duration_text, size_text


@given(st.integers(min_value=0, max_value=1 << 50))
def test_sizes_stay_near(size_bytes: int) -> None:
    number, unit = size_text(size_bytes).split()
    factor = 1024 ** ["bytes", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(number) * factor - size_bytes) <= 0.001 * size_bytes


def test_durations_have_the_unit_that_suits_them() -> None:
    told = [duration_text(s) for s in (None, 0.0004, 0.25, 2.345, 600)]
    assert told == ["–", "0 ms", "250 ms", "2.35 s", "10 min"]


def test_ages_have_the_largest_unit_that_fits() -> None:
    told = [age_text(s) for s in (-1.0, 5, 90, 3 * 3600, 3 * 86400)]
    assert told == ["0 s", "5 s", "2 min", "3 h", "3 d"]
