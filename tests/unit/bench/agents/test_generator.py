"""The generated sessions: the statistics that the generator promises, and the seed."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics

import pytest

from bench.agents.generator import Shape, generate
from bench.agents.paths import paths_of
from bench.agents.trace import Request, Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(12_000, Shape(), seed=3)


def by_session(trace: Trace) -> dict[int, list[Request]]:
    found = collections.defaultdict(list)
    for each in trace.requests:
        found[each.session].append(each)
    return found


def test_the_seed_gives_the_trace() -> None:
    assert generate(500, Shape(), seed=1) == generate(500, Shape(), seed=1) != generate(500, Shape(), seed=2)


def test_sessions_have_50_to_250_turns_and_their_agents_fewer(trace: Trace) -> None:
    ended = [requests for requests in by_session(trace).values() if requests[-1].is_last]
    counts = [len(requests) for requests in ended if requests[0].parent is None]
    assert len(counts) >= 20 and min(counts) >= 50 and max(counts) <= 250
    nested = [len(requests) for requests in ended if requests[0].parent is not None]
    assert nested and statistics.fmean(nested) < 25


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nearly_all_of_a_prompt_was_sent_before(seed: int) -> None:
    trace = generate(12_000, Shape(), seed=seed)
    new = paths_of(trace).block_count * trace.block_token_count
    assert 0.94 <= 1 - new / trace.prompt_token_count <= 0.975


def test_pauses_are_seconds_minutes_and_now_and_then_hours(trace: Trace) -> None:
    gaps = sorted(
        later.time_s - each.time_s
        for requests in by_session(trace).values()
        if requests[0].parent is None
        for each, later in itertools.pairwise(requests)
    )
    share = {limit: sum(gap > limit for gap in gaps) / len(gaps) for limit in (0, 60, 3600)}
    assert share[0] == 1.0
    assert 0.1 < share[60] < 0.3
    assert 0.005 < share[3600] < 0.02


def test_a_parent_waits_for_its_agent_and_both_begin_differently(trace: Trace) -> None:
    sessions = by_session(trace)
    nested = [requests for requests in sessions.values() if requests[0].parent is not None]
    for requests in nested[:20]:
        number = requests[0].parent
        assert number is not None
        parent = sessions[number]
        between = [each for each in parent if requests[0].time_s < each.time_s < requests[-1].time_s]
        assert between == []
        assert requests[0].prompt[0] != parent[0].prompt[0]


def test_prompts_are_within_the_context_and_their_blocks_are_whole(trace: Trace) -> None:
    shape = Shape()
    for each in trace.requests:
        blocks = sum(span.block_count for span in each.prompt)
        assert each.token_count <= shape.context_token_limit
        assert 0 <= each.token_count - blocks * shape.block_token_count < 2 * shape.block_token_count


def test_requests_come_in_order_of_time_and_as_many_as_asked_for(trace: Trace) -> None:
    times = [each.time_s for each in trace.requests]
    assert len(times) == 12_000 and times == sorted(times)
    few = generate(3_000, dataclasses.replace(Shape(), open_count=1), seed=3)
    many = generate(3_000, dataclasses.replace(Shape(), open_count=30), seed=3)
    assert few.requests[-1].time_s > 3 * many.requests[-1].time_s
