"""Blocks from SSD return to RAM behind decode steps: not before the first token, one slice a step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.cache.step_house import BLOCK, StepHouse, prompt


def _store(directory: Path, *salts: int) -> None:
    with StepHouse(directory) as house:
        for salt in salts:
            house.ask("first", prompt(4 * BLOCK, salt=salt))


class _Slices:
    """Every slice that a house's runner was asked for: by step, and after how many tokens."""

    def __init__(self, house: StepHouse, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_step: Counter[int] = Counter()
        self.token_counts: list[int] = []
        self._step_number = 0
        runner, step = house.runner, house.loop.step
        cut = runner.continue_cut

        def count_steps() -> None:
            self._step_number += 1
            step()

        def count_slices(sequence_id, cutting, *, budget_s):
            self.by_step[self._step_number] += 1
            sequence = next(s for s in house.scheduler.running if s.sequence_id == sequence_id)
            self.token_counts.append(len(sequence.output_token_ids))
            return cut(sequence_id, cutting, budget_s=budget_s)

        monkeypatch.setattr(house.loop, "step", count_steps)
        monkeypatch.setattr(runner, "continue_cut", count_slices)


def test_nothing_is_copied_before_the_first_token_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(tmp_path, 0)
    with StepHouse(tmp_path) as house:
        slices = _Slices(house, monkeypatch)
        assert house.ask("again", prompt(4 * BLOCK), max_output_tokens=1).cache.ssd_token_count > 0
        assert not slices.token_counts
        house.ask("again", prompt(4 * BLOCK), max_output_tokens=20)
        # Of four blocks the last is used without its last token: it came whole all the same.
        assert slices.token_counts[0] == 2 and len(slices.token_counts) == 2 * 3
        assert house.ask("again", prompt(4 * BLOCK)).cache.ssd_token_count == 0


def test_many_that_were_restored_lengthen_a_step_by_one_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(tmp_path, 0, 1, 2)
    with StepHouse(tmp_path) as house:
        slices = _Slices(house, monkeypatch)
        for salt in range(3):
            house.submit(f"again {salt}", prompt(4 * BLOCK, salt=salt), max_output_tokens=30)
        house.step_until_idle()
        assert all(house.answer(f"again {salt}").cache.ssd_token_count > 0 for salt in range(3))
        assert set(slices.by_step.values()) == {1}
        assert slices.by_step.total() == 3 * 2 * 3


def test_who_ends_in_the_middle_of_a_block_keeps_nobody_from_promoting(tmp_path: Path) -> None:
    _store(tmp_path, 0, 1)
    with StepHouse(tmp_path) as house:
        house.submit("brief", prompt(4 * BLOCK), max_output_tokens=2)
        house.submit("long", prompt(4 * BLOCK, salt=1), max_output_tokens=20)
        house.step_until_idle()
        assert house.answer("brief").cache.ssd_token_count > 0
        assert house.ask("long", prompt(4 * BLOCK, salt=1)).cache.ssd_token_count == 0
        house.check()
