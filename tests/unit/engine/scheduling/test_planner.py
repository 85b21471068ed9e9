"""A prompt beside decoding rows gives way where passes are slow, and not for a single one."""

from __future__ import annotations

from icehouse_server.engine.scheduling.budget import PassPlanner
from icehouse_server.engine.scheduling.limits import SchedulerLimits
from icehouse_server.engine.scheduling.pass_cost import PassSize

ROWS = PassSize.of_rows([40] * 8)


def learned(*, grid_token_count: int = 1) -> PassPlanner:
    limits = SchedulerLimits(
        running_limit=9,
        prefilling_limit=9,
        prefill_chunk_token_count=1024,
        prefill_grid_token_count=grid_token_count,
        prefill_chunk_s=0.5,
    )
    planner = PassPlanner(limits)
    for _ in range(8):
        note(planner, 0)
        for count in (64, 16, 32):
            note(planner, count)
    return planner


def note(planner: PassPlanner, chunk_token_count: int, *, slowness: float = 1.0) -> None:
    """Note a pass of the rows and a chunk, which takes 20 ms and 1 ms a token beside."""
    size = ROWS + PassSize.of_chunk(0, chunk_token_count) if chunk_token_count else ROWS
    planner.note_pass(size, slowness * (0.02 + 0.001 * chunk_token_count))


def room(planner: PassPlanner) -> int:
    return planner.budget(ROWS, waiting_per_row=0.0, spent_s=0.0).take(0, 1000)


def test_a_slow_pass_makes_the_next_ones_shorter_and_a_second_one_more_so() -> None:
    planner = learned()
    rooms = [room(planner)]
    for slowness in (1.4, 1.4, 1.0, 1.0):
        note(planner, 16, slowness=slowness)
        rooms.append(room(planner))
    usual, once, twice, after, later = rooms
    assert 0 < twice < once < usual
    assert twice < after <= later <= usual


def test_where_little_is_left_a_prompt_still_comes_on_by_the_grid_if_that_is_within_the_promise() -> None:
    """Fewer tokens take as long: 1 to 3 of them did in every second pass of a busy machine."""
    rooms = []
    for grid_token_count in (8, 16, 64):
        planner = learned(grid_token_count=grid_token_count)
        for _ in range(4):
            note(planner, 16, slowness=1.9)
        rooms.append(room(planner))
    assert rooms[:2] == [8, 16]
    assert 0 < rooms[2] < 16, "64 tokens would take four times what the rows do"


def test_a_prompt_never_gets_more_than_it_has_left() -> None:
    planner = learned(grid_token_count=16)
    for _ in range(4):
        note(planner, 16, slowness=1.9)
    for count in range(1, 40):
        stop = planner.budget(ROWS, waiting_per_row=0.0, spent_s=0.0).take(100, 100 + count)
        assert 100 < stop <= 100 + count


def test_rows_that_grew_since_they_were_alone_leave_a_prompt_some_of_a_pass() -> None:
    """Twice their pace of before is less than they take by themselves now."""
    planner = learned()
    grown = PassSize.of_rows([4000] * 8)
    for count in (16, 32, 64) * 4:
        planner.note_pass(grown + PassSize.of_chunk(0, count), 0.05 + 0.001 * count)
    assert planner.seconds(grown) > 2.0 * planner.seconds(ROWS)
    assert planner.budget(grown, waiting_per_row=0.0, spent_s=0.0).take(0, 1000) >= 8
