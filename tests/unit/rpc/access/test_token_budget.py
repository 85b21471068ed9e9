"""The bucket of tokens per minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from icehouse_server.rpc.access.tenants import TokenBudget

from tests.unit.rpc.conftest import FakeClock


def test_it_fills_steadily_and_never_over() -> None:
    clock = FakeClock()
    budget = TokenBudget(tokens_per_minute=600, clock=clock)
    budget.reserve(600)
    assert (budget.level, budget.wait_s(100)) == (0, 10.0)
    clock.now += 5
    assert (budget.level, budget.wait_s(100)) == (50, 5.0)
    clock.now += 3600
    assert budget.level == 600
    budget.give_back(1)
    assert budget.level == 600


def test_more_than_a_bucket_goes_in_when_it_is_full_and_is_owed() -> None:
    clock = FakeClock()
    budget = TokenBudget(tokens_per_minute=60, clock=clock)
    assert budget.wait_s(180) == 0
    budget.reserve(180)
    assert budget.level == -120
    assert budget.wait_s(1) == 121
    clock.now += 121
    assert budget.wait_s(1) == 0


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500), st.floats(0, 30)), min_size=1, max_size=30)
)
def test_no_minute_gives_more_than_its_tokens_and_one_bucket(work: list[tuple[int, int, float]]) -> None:
    clock = FakeClock()
    limit = 100
    budget = TokenBudget(tokens_per_minute=limit, clock=clock)
    began, used = clock.now, 0
    for wanted, unused, pause_s in work:
        clock.now += pause_s
        if budget.wait_s(wanted) > 0:
            continue
        before = budget.level
        budget.reserve(wanted)
        unused = min(unused, wanted)
        budget.give_back(unused)
        used += wanted - unused
        assert before <= limit
        # Only the last request let in may have gone below the bottom.
        assert used - (wanted - unused) <= limit + limit * (clock.now - began) / 60 + 1
