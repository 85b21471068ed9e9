"""What an earlier run learned of speed: it decides until this run has loaded often enough, and no longer."""

from __future__ import annotations

import dataclasses

import pytest
from icehouse_server.engine.prefix_cache.tiers.storage_waits import Rates
from icehouse_server.storage.api import LearnedRates

HERE = "a machine, a device"
SLOW = LearnedRates(HERE, 1e9, 1e6, 1e5)
"""4 GB of 40,000 tokens take 4 s to read and 0.4 s to compute."""
FAST = dataclasses.replace(SLOW, read_bytes_per_s=1e11)


def recalling(learned: LearnedRates) -> Rates:
    rates = Rates(HERE)
    rates.recall(learned)
    return rates


def computes(rates: Rates) -> bool:
    return rates.recompute_is_faster(ssd_bytes=4 * 10**9, token_count=40_000)


def count_untried(rates: Rates) -> int:
    """Return how many prompts are computed before one is read."""
    untried = rates.untried_count
    while computes(rates):
        rates.untried_count += 1
        assert rates.untried_count < 1000, "it is never tried again"
    return rates.untried_count - untried


def test_what_an_earlier_run_learned_decides_the_first_load() -> None:
    assert computes(recalling(SLOW)) and not computes(recalling(FAST))
    assert not computes(Rates(HERE)), "nothing is known"


def test_what_was_learned_elsewhere_says_nothing() -> None:
    assert not computes(recalling(dataclasses.replace(SLOW, measured_on="another device")))


def test_a_run_that_confirms_what_it_recalls_goes_by_its_own_loads_from_the_third_on() -> None:
    rates = recalling(SLOW)
    for _ in range(3):
        assert computes(rates)
        rates.note_read(SLOW.read_bytes_per_s)
    assert count_untried(rates) > 200, "what this run found slow is tried rarely"
    assert rates.learned == SLOW, "and its prompts since do not count for the next run"


def test_a_disk_that_only_hung_is_found_out_by_one_load_after_a_few_prompts() -> None:
    rates = recalling(SLOW)
    assert 10 < count_untried(rates) < 30
    rates.note_read(FAST.read_bytes_per_s)
    assert not computes(rates) and rates.learned == FAST


def test_runs_too_short_to_find_it_out_add_up() -> None:
    learned, prompt_count = SLOW, 0
    while computes(recalling(learned)):
        rates = recalling(learned)
        rates.untried_count += 1
        assert rates.learned is not None and prompt_count < 30
        learned, prompt_count = rates.learned, prompt_count + 1
    assert prompt_count > 10


def test_one_slow_load_does_not_outweigh_an_earlier_run_but_three_do() -> None:
    rates = recalling(FAST)
    for _ in range(2):
        rates.note_read(SLOW.read_bytes_per_s)
        assert not computes(rates) and rates.learned == FAST, "it may have met cold files"
    rates.note_read(SLOW.read_bytes_per_s)
    assert computes(rates) and rates.learned == SLOW


def test_what_was_wrong_about_computing_is_found_out_within_some_passes() -> None:
    rates = recalling(dataclasses.replace(SLOW, prefill_tokens_per_s=1e6))
    passes = 0
    while computes(rates):
        rates.note_prefill(1e3)
        passes += 1
        assert passes < 30, "it is never found out"
    rates = recalling(SLOW)
    rates.note_prefill(1.0)
    assert computes(rates), "the first pass may have compiled kernels"
    rates = recalling(FAST)
    rates.note_adopt(1.0)
    assert not computes(rates), "the first restore too"


@pytest.mark.parametrize("load_count", range(3))
def test_too_few_loads_teach_nothing(load_count: int) -> None:
    rates = Rates(HERE)
    rates.note_adopt(1.0)
    rates.note_prefill(1.0)
    for _ in range(load_count):
        rates.note_read(1.0)
    assert rates.learned is None
    for _ in range(3 - load_count):
        rates.note_read(1.0)
    assert rates.learned == LearnedRates(HERE, 1.0, 1.0, 1.0)


def test_nothing_is_learned_of_what_was_not_measured() -> None:
    rates = Rates(HERE)
    for _ in range(3):
        rates.note_read(1.0)
    assert rates.learned is None, "nothing was computed"


def test_a_directory_that_was_opened_anew_changes_nothing() -> None:
    rates = recalling(SLOW)
    rates.untried_count += 5
    rates.recall(FAST)
    assert rates.learned == dataclasses.replace(SLOW, untried_count=5)
    measured = Rates(HERE)
    measured.note_read(1.0)
    measured.recall(FAST)
    assert measured.read_bytes_per_s == 1.0
