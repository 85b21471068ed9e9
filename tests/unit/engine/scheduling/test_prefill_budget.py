"""The oldest prompt's share: the balance between the oldest prompt and those that overtake it, in seconds."""

from __future__ import annotations

from icehouse_server.engine.scheduling.prefill_budget import OldestShare


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
