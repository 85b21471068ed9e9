"""What chunks are expected to cost, from those before them.

The balance between the oldest prompt and those that overtake it, in seconds.
"""

from __future__ import annotations

import pytest
from icehouse_server.engine.scheduling.prefill_budget import OldestShare, PrefillPace


def taught(*chunks: tuple[int, float], context: int = 100) -> PrefillPace:
    pace = PrefillPace()
    for token_count, elapsed_s in chunks:
        pace.note(token_count=token_count, context_token_count=context, elapsed_s=elapsed_s)
    return pace


def test_nothing_is_expected_before_the_first_chunk() -> None:
    assert PrefillPace().cost(0) is None


def test_chunks_of_two_sizes_tell_what_is_fixed_from_what_grows() -> None:
    pace = taught(*[(8, 0.018), (32, 0.042)] * 4)
    cost = pace.cost(100)
    assert cost is not None
    assert cost.fixed_s == pytest.approx(0.010) and cost.token_s == pytest.approx(0.001)
    assert cost.tokens_within(0.030) == pytest.approx(20)
    assert cost.tokens_at_share(0.5) == pytest.approx(10)
    assert cost.tokens_at_share(0.125) == pytest.approx(70)


def test_chunks_of_one_size_count_as_all_growing() -> None:
    cost = taught(*[(16, 0.016)] * 5).cost(100)
    assert cost is not None and cost.fixed_s == 0.0 and cost.token_s == pytest.approx(0.001)


def test_each_octave_of_context_has_its_own_cost_and_others_ask_the_nearest() -> None:
    pace = PrefillPace()
    for context, token_s in ((100, 0.001), (8000, 0.009)):
        for _ in range(3):
            pace.note(token_count=10, context_token_count=context, elapsed_s=10 * token_s)
    found = [cost.token_s for at in (0, 100, 5000, 9000, 100_000) if (cost := pace.cost(at)) is not None]
    assert found == [pytest.approx(t) for t in (0.001, 0.001, 0.009, 0.009, 0.009)]


def test_one_hiccup_changes_little_and_what_lasts_is_learned() -> None:
    pace = taught(*[(10, 0.010)] * 20)
    pace.note(token_count=10, context_token_count=100, elapsed_s=1.0)
    cost = pace.cost(100)
    assert cost is not None and cost.seconds(10) < 0.012
    for _ in range(40):
        pace.note(token_count=10, context_token_count=100, elapsed_s=0.1)
    cost = pace.cost(100)
    assert cost is not None and cost.seconds(10) == pytest.approx(0.1, rel=0.1)


def test_free_chunks_have_no_end() -> None:
    cost = taught((16, 0.0)).cost(100)
    assert cost is not None and cost.tokens_within(0.0) == float("inf")


def test_a_quarter_of_the_time_is_owed() -> None:
    share = OldestShare()
    assert not share.is_due(0.0), "nobody has overtaken it"
    share.note(3.0, was_oldest=False)
    assert share.is_due(0.99) and not share.is_due(1.01)
    share.note(0.9, was_oldest=True)
    assert share.is_due(0.09) and not share.is_due(0.11)


def test_time_it_had_to_itself_is_held_against_it() -> None:
    share = OldestShare()
    share.note(0.5, was_oldest=True)
    share.note(1.2, was_oldest=False)
    assert not share.is_due(0.0)
    share.note(0.6, was_oldest=False)
    assert share.is_due(0.09)


def test_no_more_than_a_second_of_it() -> None:
    share = OldestShare()
    share.note(3600.0, was_oldest=True)
    share.note(3.3, was_oldest=False)
    assert share.is_due(0.09), "an hour alone does not pay for three hours of waiting"
