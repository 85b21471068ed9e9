"""Speculation of one row: how many guesses it makes, when it stops and when it comes back."""

from __future__ import annotations

import pytest
from icehouse_server.domain.request import DraftCounts, Drafting, Speculation, SpeculationLimit
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import DecodeRow
from icehouse_server.engine.runner.draft_model import DraftedRow
from icehouse_server.engine.runner.forward.row import Row
from icehouse_server.engine.runner.speculation import GUESS_LIMIT, SpeculatingRow, guesses_of, limit_of
from icehouse_server.engine.sampling.sampling_row import SamplingRow

_LOOKUP = Speculation(draft_token_limit=8, ngram_token_limit=3)
_ROUND = list(range(10, 40))


def row_of(token_ids: list[int], *, limit: SpeculationLimit = SpeculationLimit.NONE) -> SpeculatingRow:
    return SpeculatingRow(_LOOKUP, token_ids, limit=limit)


def test_a_row_whose_guesses_come_true_guesses_twice_as_many() -> None:
    row = row_of([*_ROUND, 10])
    known = [*_ROUND, 10]
    windows = []
    for _ in range(4):
        guesses = row.look_up(100)
        windows.append(len(guesses))
        kept = [_ROUND[(len(known) + i) % len(_ROUND)] for i in range(len(guesses) + 1)]
        assert kept[:-1] == guesses
        counts = row.take(kept, guess_count=len(guesses), accepted_count=len(guesses))
        assert counts == DraftCounts(len(guesses), len(guesses))
        known += kept
    assert windows == [4, 8, 8, 8]


def test_a_row_whose_guesses_fail_guesses_less_then_stops_and_says_so() -> None:
    row = row_of([5, 6, 7, 5])
    fed = 0
    for _ in range(4):
        guesses = row.look_up(100)
        fed += len(guesses)
        row.take([5], guess_count=len(guesses), accepted_count=0)
    assert not row.is_guessing and fed <= 7
    assert row.take([5], guess_count=0, accepted_count=0).limit is SpeculationLimit.ACCEPTANCE


def test_a_row_that_stopped_comes_back_when_its_guesses_would_have_come_true() -> None:
    row = row_of([50, 51])
    for token_id in (52, 53, 54, 55):  # nothing repeats: nothing is guessed right
        row.take([token_id], guess_count=0, accepted_count=0)
    assert not row.is_guessing
    for token_id in (50, 51, 52, 53, 54):
        row.take([token_id], guess_count=0, accepted_count=0)
    assert row.is_guessing and row.look_up(100) == [55, 50, 51, 52, 53, 54][: len(row.look_up(100))]


@pytest.mark.parametrize("accepted_count", [1, 2])
def test_a_row_that_waits_for_its_guesses_is_judged_by_what_it_gains(accepted_count: int) -> None:
    """In the pass that it waits it would have drawn a token."""
    row = row_of([*_ROUND, 10])
    for _ in range(4):
        row.note_wait()
        row.take([11], guess_count=4, accepted_count=accepted_count)
    assert row.is_guessing is (accepted_count == 2)


def test_a_row_that_is_not_asked_is_not_judged() -> None:
    row = row_of([50, 51])
    for token_id in (52, 53, 54, 55):
        row.take([token_id], guess_count=0, accepted_count=0, was_asked=False)
    assert row.is_guessing


def test_a_draft_model_that_still_reads_the_prompt_is_not_judged() -> None:
    drafted = DraftedRow(Row([]))
    asked = Speculation(draft_token_limit=4, drafting=Drafting.DRAFT_MODEL)
    row = SpeculatingRow(asked, [1], limit=SpeculationLimit.NONE, drafted=drafted)
    for token_id in range(200):
        row.take([token_id], guess_count=0, accepted_count=0)
    assert row.is_guessing and drafted.behind == list(range(200))
    for _ in range(24):
        row.take([1], guess_count=4, accepted_count=0)
    assert not row.is_guessing and row.drafted is None


def test_all_rows_share_the_guesses_of_a_pass() -> None:
    rows = [row_of([*_ROUND, 10]) for _ in range(GUESS_LIMIT)]
    guesses, _ = guesses_of(rows, None)
    assert sum(map(len, guesses)) == GUESS_LIMIT and {len(each) for each in guesses} == {1}


@pytest.mark.parametrize(
    ("sampling", "can_take_back", "drafting", "limit"),
    [
        (SamplingParams(), True, Drafting.PROMPT_LOOKUP, SpeculationLimit.NONE),
        (SamplingParams(), False, Drafting.PROMPT_LOOKUP, SpeculationLimit.CACHE),
        (SamplingParams(repetition_penalty=1.2), True, Drafting.PROMPT_LOOKUP, SpeculationLimit.SAMPLING),
        (SamplingParams(), True, Drafting.DRAFT_MODEL, SpeculationLimit.NO_DRAFT_MODEL),
    ],
)
def test_why_a_row_cannot_speculate(
    sampling: SamplingParams, can_take_back: bool, drafting: Drafting, limit: SpeculationLimit
) -> None:
    row = SamplingRow(DecodeRow(sampling, prompt_token_ids=(1,)))
    asked = Speculation(draft_token_limit=4, drafting=drafting)
    assert limit_of(asked, row, can_take_back=can_take_back, draft_model=None) is limit
