"""When the device ended what: a time is told only where the end was seen in its order."""

from __future__ import annotations

from icehouse_server.engine.core.device_clock import DeviceClock


def test_each_piece_of_work_begins_where_the_one_before_it_ended() -> None:
    clock = DeviceClock()
    first, second = clock.begin(), clock.begin()
    assert clock.end(first, began_time=10.0, now=13.0) == 3.0
    assert clock.end(second, began_time=11.0, now=15.0) == 2.0
    assert clock.end(clock.begin(), began_time=20.0, now=21.0) == 1.0, "the device had nothing to do between"


def test_what_ended_behind_other_work_has_no_known_time() -> None:
    clock = DeviceClock()
    hidden = clock.begin()
    clock.note_other(50.0)  # a part of a model's loading, which was waited for
    assert clock.end(hidden, began_time=10.0, now=60.0) == 0.0
    assert clock.end(clock.begin(), began_time=40.0, now=52.0) == 2.0, "it left the end that was seen"
