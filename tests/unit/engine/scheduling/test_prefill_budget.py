"""A prompt beside decoding rows gives way where passes are slow, and not for a single one."""

from __future__ import annotations

from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.prefill_budget import BudgetLimits, PrefillBudget

ROWS = PassSize.of_rows([40] * 8)


def learned(*, grid_token_count: int = 1) -> PrefillBudget:
    limits = BudgetLimits(slice_s=0.0, chunk_s=0.5, token_count=1024, grid_token_count=grid_token_count)
    budget = PrefillBudget(limits)
    for _ in range(8):
        note(budget, 0)
        for count in (64, 16, 32):
            note(budget, count)
            budget.note_cut_beside(count)
    return budget


def note(budget: PrefillBudget, chunk_token_count: int, *, slowness: float = 1.0) -> None:
    """Note a pass of the rows and a chunk, which takes 20 ms and 1 ms a token beside."""
    size = ROWS + PassSize.of_chunk(0, chunk_token_count) if chunk_token_count else ROWS
    budget.note_pass(size, slowness * (0.02 + 0.001 * chunk_token_count))


def room(budget: PrefillBudget) -> int:
    return budget.room(ROWS, crowd=0.0, spent_s=0.0).take(0, 1000)


def test_a_slow_pass_makes_the_next_ones_shorter_and_a_second_one_more_so() -> None:
    budget = learned()
    rooms = [room(budget)]
    for slowness in (1.4, 1.4, 1.0, 1.0):
        note(budget, 16, slowness=slowness)
        rooms.append(room(budget))
    usual, once, twice, after, later = rooms
    assert 0 < twice < once < usual
    assert twice < after <= later <= usual


def test_where_little_is_left_a_prompt_still_comes_on_by_the_grid_if_that_is_within_the_promise() -> None:
    """Fewer tokens take as long: 1 to 3 of them did in every second pass of a busy machine."""
    rooms = []
    for grid_token_count in (8, 16, 64):
        budget = learned(grid_token_count=grid_token_count)
        for _ in range(4):
            note(budget, 16, slowness=1.9)
        rooms.append(room(budget))
    assert rooms[:2] == [8, 16]
    assert 0 < rooms[2] < 16, "64 tokens would take four times what the rows do"


def test_a_prompt_never_gets_more_than_it_has_left() -> None:
    budget = learned(grid_token_count=16)
    for _ in range(4):
        note(budget, 16, slowness=1.9)
    for count in range(1, 40):
        stop = budget.room(ROWS, crowd=0.0, spent_s=0.0).take(100, 100 + count)
        assert 100 < stop <= 100 + count


def test_rows_that_grew_slower_than_known_do_not_keep_prompts_from_going_through_a_few_layers() -> None:
    """What the rows took more was taken for the layers', the fewer of them the dearer: 1,000 tokens beside
    eight rows came on by one layer in a pass, and all later prompts by whole passes for good."""
    budget, whole = learned(), PassSize.of_chunk(0, 64)
    counts = []
    for _ in range(100):
        count = budget.room(ROWS, crowd=0.0, spent_s=0.0).layers(whole, left=16, layer_count=16, least=1)
        counts.append(count)
        budget.note_layers(ROWS, whole.part(count / 16), 0.026 + 0.001 * 64 * count / 16)
    assert counts[-1] > 1, counts
    assert budget.room(ROWS, crowd=0.0, spent_s=0.0).take_layered(0, 1000, layer_count=16) > 0
