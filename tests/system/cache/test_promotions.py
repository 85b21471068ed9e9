"""Blocks from SSD return to RAM behind decode steps: not before the first token, one slice a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from icehouse_server.engine.core.sequence import Sequence

from tests.system.cache.stepped_server import BLOCK, SteppedServer, expected_tokens, prompt


def _store(directory: Path, *salts: int) -> None:
    with SteppedServer(directory) as served:
        for salt in salts:
            served.ask("first", prompt(4 * BLOCK, salt=salt))


class _Slices:
    """Every slice that a house's runner was asked for: by step, and after how many tokens."""

    def __init__(self, served: SteppedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_step: Counter[int] = Counter()
        self.token_counts: list[int] = []
        self._step_number = 0
        runner, step = served.runner, served.loop.step
        cut = runner.continue_cut

        def count_steps() -> None:
            self._step_number += 1
            step()

        def count_slices(sequence_id, cutting, *, budget_s):
            self.by_step[self._step_number] += 1
            sequence = next(s for s in served.scheduler.running if s.sequence_id == sequence_id)
            self.token_counts.append(len(sequence.output_token_ids))
            return cut(sequence_id, cutting, budget_s=budget_s)

        monkeypatch.setattr(served.loop, "step", count_steps)
        monkeypatch.setattr(runner, "continue_cut", count_slices)


def test_nothing_is_copied_before_the_first_token_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(tmp_path, 0)
    with SteppedServer(tmp_path) as served:
        slices = _Slices(served, monkeypatch)
        assert served.ask("again", prompt(4 * BLOCK), max_output_tokens=1).cache.ssd_token_count > 0
        assert not slices.token_counts
        served.ask("again", prompt(4 * BLOCK), max_output_tokens=20)
        # Of four blocks the last is used without its last token: it came whole all the same.
        assert slices.token_counts[0] == 2 and len(slices.token_counts) == 2 * 3
        assert served.ask("again", prompt(4 * BLOCK)).cache.ssd_token_count == 0


def test_many_that_were_restored_lengthen_a_step_by_one_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(tmp_path, 0, 1, 2)
    with SteppedServer(tmp_path) as served:
        slices = _Slices(served, monkeypatch)
        for salt in range(3):
            served.submit(f"again {salt}", prompt(4 * BLOCK, salt=salt), max_output_tokens=30)
        served.step_until_idle()
        assert all(served.answer(f"again {salt}").cache.ssd_token_count > 0 for salt in range(3))
        assert set(slices.by_step.values()) == {1}
        assert slices.by_step.total() == 3 * 2 * 3


def test_who_ends_in_the_middle_of_a_block_keeps_nobody_from_promoting(tmp_path: Path) -> None:
    _store(tmp_path, 0, 1)
    with SteppedServer(tmp_path) as served:
        served.submit("brief", prompt(4 * BLOCK), max_output_tokens=2)
        served.submit("long", prompt(4 * BLOCK, salt=1), max_output_tokens=20)
        served.step_until_idle()
        assert served.answer("brief").cache.ssd_token_count > 0
        assert served.ask("long", prompt(4 * BLOCK, salt=1)).cache.ssd_token_count == 0
        served.check()


def test_who_is_parked_in_the_middle_of_a_block_copies_the_right_one_when_it_goes_on(tmp_path: Path) -> None:
    _store(tmp_path, 0)
    with SteppedServer(tmp_path) as served:
        served.submit("parked", prompt(4 * BLOCK), max_output_tokens=30)
        (sequence,) = _step_until_running(served, lambda found: len(found.unkept) == 2)
        served.loop.step()  # a slice of the second one
        copied = [entry for entry in list(served.cache.tree) if entry.ram]
        assert copied[0].start_token_index == 0 and copied[0].ssd
        # Its first block leaves RAM again, and what it has computed goes to SSD behind that.
        served.cache.ram.yield_bytes(1 << 30)
        served.loop._park(sequence)
        served.step_until_idle()
        assert served.answer("parked").tokens == expected_tokens(prompt(4 * BLOCK), 30)
        assert served.ask("again", prompt(4 * BLOCK)).cache.ssd_token_count == 0
        served.check()


def _step_until_running(served: SteppedServer, is_there: Callable[[Sequence], bool]) -> list[Sequence]:
    """Step engine and storage until those that run are all so; return them."""
    for _ in range(1000):
        served.settle_storage()
        served.loop.step()
        running = served.scheduler.running
        if running and all(map(is_there, running)):
            return running
    raise AssertionError("they never came so far")
