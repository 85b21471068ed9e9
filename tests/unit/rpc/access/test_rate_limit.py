"""The first refusals at once, then so many a second, none later than it may be."""

from __future__ import annotations

from icehouse_server.rpc.access.shares import RateLimit
from icehouse_server.rpc.calls.call_lifecycle import REFUSAL_BURST_COUNT, REFUSALS_PER_S


def delays(pace: RateLimit, origin: str, count: int, *, now: float = 100.0) -> list[float]:
    return [pace.delay_s(origin, now=now, longest_s=1.0) for _ in range(count)]


def test_the_first_are_told_at_once_and_the_others_in_turn() -> None:
    pace = RateLimit(rate_per_s=REFUSALS_PER_S, burst_count=REFUSAL_BURST_COUNT)
    assert set(delays(pace, "a", REFUSAL_BURST_COUNT)) == {0.0}
    later = delays(pace, "a", 3)
    assert [round(each * REFUSALS_PER_S) for each in later] == [1, 2, 3]


def test_what_takes_long_to_refuse_is_several_turns() -> None:
    pace = RateLimit(rate_per_s=REFUSALS_PER_S, burst_count=REFUSAL_BURST_COUNT)
    first = pace.delay_s("a", now=100.0, longest_s=10.0, turn_count=REFUSAL_BURST_COUNT)
    second = pace.delay_s("a", now=100.0, longest_s=10.0, turn_count=REFUSALS_PER_S)
    assert (first, round(second, 6)) == (0.0, 1.0)


def test_one_callers_flood_keeps_no_other_waiting() -> None:
    pace = RateLimit(rate_per_s=REFUSALS_PER_S, burst_count=REFUSAL_BURST_COUNT)
    delays(pace, "a", 10 * REFUSAL_BURST_COUNT)
    assert delays(pace, "b", 1) == [0.0]


def test_nobody_waits_longer_than_it_may_and_all_is_forgotten_in_time() -> None:
    pace = RateLimit(rate_per_s=REFUSALS_PER_S, burst_count=REFUSAL_BURST_COUNT)
    assert max(delays(pace, "a", 1000)) == 1.0
    assert set(delays(pace, "a", REFUSAL_BURST_COUNT, now=105.0)) == {0.0}


def test_callers_that_come_once_are_not_kept() -> None:
    pace = RateLimit(rate_per_s=REFUSALS_PER_S, burst_count=REFUSAL_BURST_COUNT)
    for number in range(5000):
        delays(pace, f"peer:{number}", 1)
    assert len(pace._due_times) <= 1024
