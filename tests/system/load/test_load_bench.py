"""What the load bench makes of a run: the plan of arrivals, the slowest gaps, the ratio at the stop."""

from __future__ import annotations

import pytest

from bench.load_arrivals import poisson_arrivals
from bench.load_gaps import slow_gap_kinds
from bench.load_run import LoadPoint, Percentiles, goodput_ratio_at_stop
from bench.replies import Reply


def test_a_higher_rate_is_the_same_plan_faster_and_in_other_words() -> None:
    slow = poisson_arrivals(rate_per_s=1.0, duration_s=40.0, seed=1)
    fast = poisson_arrivals(rate_per_s=2.0, duration_s=40.0, seed=2)
    assert len(fast) > len(slow) > 20
    for a, b in zip(slow, fast, strict=False):
        assert (a.kind, a.max_output_tokens) == (b.kind, b.max_output_tokens)
        assert b.at_s == pytest.approx(a.at_s / 2)
        assert a.text != b.text
    assert poisson_arrivals(rate_per_s=1.0, duration_s=40.0, seed=1) == slow


def reply(start_time_s: float, *token_times_s: float) -> Reply:
    return Reply(start_time_s, token_times_s, ())


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (reply(0.0, 1.2, 1.3), "joined"),
        (reply(0.0, 0.95, 1.0), "left"),
        (reply(1.05, 1.5, 1.6), "prefill"),
        (reply(2.0, 2.5, 2.6), "decode only"),
    ],
)
def test_the_slowest_gap_is_told_by_what_others_did_in_it(other: Reply, kind: str) -> None:
    # The slowest gap lasts from 1.0 to 1.2; no other is as long.
    slowest = reply(0.0, 0.9, 1.0, 1.2, 1.3)
    assert slow_gap_kinds([slowest, other]) == {kind: 1.0}


def point(target: str, *, ttft_p95_s: float, goodput_per_s: float) -> LoadPoint:
    latency = Percentiles(0.1, ttft_p95_s, ttft_p95_s)
    return LoadPoint(target, 1.0, 100, 0, 1.0, 1.0, goodput_per_s, latency, latency, {})


def test_goodput_is_compared_where_their_p95_reaches_three_seconds() -> None:
    theirs = [
        point("theirs", ttft_p95_s=1.0, goodput_per_s=2.0),
        point("theirs", ttft_p95_s=5.0, goodput_per_s=1.0),
    ]
    ours = [
        point("ours", ttft_p95_s=0.5, goodput_per_s=2.0),
        point("ours", ttft_p95_s=0.9, goodput_per_s=4.0),
    ]
    # Half the way between the two loads: 3.0 good replies a second against 1.5.
    assert goodput_ratio_at_stop(ours, theirs) == pytest.approx(2.0)
    assert goodput_ratio_at_stop(ours[:1], theirs[:1]) is None, "no load was high enough"
    assert goodput_ratio_at_stop(ours[1:], theirs[1:]) is None, "the first was too high already"
