"""Pins that end by themselves, in the order of their ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.domain.ids import BlockHash
from icehouse_server.pins import NOT_PINNED, UNTIL_UNPINNED, PinEnds, pin_end_time

TIMES = st.sampled_from((NOT_PINNED, 1.0, 2.0, 3.0, 4.0, UNTIL_UNPINNED))


@pytest.mark.parametrize(
    ("now", "ordered", "then"),
    [
        (NOT_PINNED, 5.0, 5.0),
        (5.0, 3.0, 5.0),
        (5.0, 7.0, 7.0),
        (UNTIL_UNPINNED, 7.0, UNTIL_UNPINNED),
        (5.0, UNTIL_UNPINNED, UNTIL_UNPINNED),
        (UNTIL_UNPINNED, NOT_PINNED, NOT_PINNED),
    ],
)
def test_an_order_prolongs_a_pin_or_takes_it_off(now: float, ordered: float, then: float) -> None:
    assert pin_end_time(now, ordered) == then


@given(
    st.lists(st.tuples(st.integers(0, 3), TIMES), max_size=40), st.lists(TIMES.filter(lambda t: 0 < t < 9))
)
def test_each_pin_ends_once_and_at_its_last_time(notes: list[tuple[int, float]], looks: list[float]) -> None:
    ends, last = PinEnds(), dict[BlockHash, float]()
    for number, time in notes:
        name = BlockHash(bytes([number]) * 32)
        ends.note(name, time)
        last[name] = time
    for now in sorted(looks):
        due = {name for name, time in last.items() if NOT_PINNED < time <= now}
        taken = ends.take(now)
        assert len(taken) == len(set(taken)) and set(taken) == due
        last = {name: time for name, time in last.items() if name not in due}


def test_pins_that_are_prolonged_for_ever_take_no_memory() -> None:
    ends, name = PinEnds(), BlockHash(bytes(32))
    for time in range(1, 10_000):
        ends.note(name, float(time))
    assert len(ends._heap) < 100
    assert ends.take(10_000.0) == [name]
