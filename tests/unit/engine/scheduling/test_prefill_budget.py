"""A prompt beside decoding rows gives way where passes are slow, and not for a single one."""

from __future__ import annotations

from icehouse_server.engine.scheduling.pass_cost import PassSize
from icehouse_server.engine.scheduling.prefill_budget import BudgetLimits, PrefillBudget

ROWS = PassSize.of_rows([40] * 8)


def learned() -> PrefillBudget:
    budget = PrefillBudget(BudgetLimits(slice_s=0.0, chunk_s=0.5, token_count=1024, grid_token_count=1))
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
