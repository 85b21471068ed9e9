"""The first refusals at once, then so many a second, none later than it may be."""

from __future__ import annotations

from icehouse_server.rpc.calls.refusal_pace import BURST_COUNT, RATE_PER_S, RefusalPace


def delays(pace: RefusalPace, origin: str, count: int, *, now: float = 100.0) -> list[float]:
    return [pace.delay_s(origin, now=now, longest_s=1.0) for _ in range(count)]


def test_the_first_are_told_at_once_and_the_others_in_turn() -> None:
    pace = RefusalPace()
    assert set(delays(pace, "a", BURST_COUNT)) == {0.0}
    later = delays(pace, "a", 3)
    assert [round(each * RATE_PER_S) for each in later] == [1, 2, 3]


def test_one_callers_flood_keeps_no_other_waiting() -> None:
    pace = RefusalPace()
    delays(pace, "a", 10 * BURST_COUNT)
    assert delays(pace, "b", 1) == [0.0]


def test_nobody_waits_longer_than_it_may_and_all_is_forgotten_in_time() -> None:
    pace = RefusalPace()
    assert max(delays(pace, "a", 1000)) == 1.0
    assert set(delays(pace, "a", BURST_COUNT, now=105.0)) == {0.0}


def test_callers_that_come_once_are_not_kept() -> None:
    pace = RefusalPace()
    for number in range(5000):
        delays(pace, f"peer:{number}", 1)
    assert len(pace._due_times) <= 1024
