"""Checkpoints: where they are taken, how far a prompt goes on from them, which ones stay."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from bench.agents.checkpoints import Budget, Checkpoints, Victim
from bench.agents.rules import Rule
from bench.agents.simulation import Replay, budgets
from bench.agents.tiers import Cache, Limits
from bench.agents.trace import StreamIndex, Trace
from tests.fixtures.agent_traces import BLOCK, Block, blocks_of, random_trace, request

EVERYTHING = Limits(10_000, 10_000)
ALL = Budget("all", interval_token_count=4 * BLOCK, at_heads=False)


def played(
    asked: list[tuple[int, list[int]]], budget: Budget, limits: Limits = EVERYTHING, *, size_blocks: int = 0
) -> tuple[list[int], Checkpoints]:
    """Return how many blocks each prompt had, and the checkpoints."""
    index = StreamIndex()
    last = {session: number for number, (session, _) in enumerate(asked)}
    requests = [
        request(index, ids, session=s, time_s=float(n), is_last=last[s] == n)
        for n, (s, ids) in enumerate(asked)
    ]
    paths = Replay(Trace("given", BLOCK, tuple(requests))).paths
    checkpoints = Checkpoints(paths, budget, size_blocks=size_blocks)
    cache = Cache(paths, limits, Rule.LRU, checkpoints=checkpoints)
    hits = [cache.play(number, each) for number, each in enumerate(requests)]
    return [hit.ram_count + hit.ssd_count for hit in hits], checkpoints


def test_a_prompt_goes_on_from_the_last_checkpoint_within_what_is_known() -> None:
    asked = [(0, [*range(10)]), (1, [*range(7), 50, 51]), (0, [*range(12)])]
    hits, checkpoints = played(asked, ALL)
    # At 4, 8 and the end of the first prompt; at 8 of the second one, and its end.
    assert hits == [0, 4, 10]
    assert checkpoints.held_at_ends == [2, 4]


def test_without_an_interval_only_ends_and_heads_are_left() -> None:
    asked = [(0, [*range(10)]), (1, [*range(7), 50])]
    rare = dataclasses.replace(ALL, interval_token_count=0)
    assert played(asked, rare)[0] == [0, 0]
    # Two blocks of tools and instructions.
    assert played(asked, dataclasses.replace(rare, at_heads=True))[0] == [0, 2]


def test_a_branch_gets_a_checkpoint_when_a_second_prompt_comes_to_it() -> None:
    asked = [(n, [*range(7), 50 + n]) for n in range(3)]
    budget = dataclasses.replace(ALL, at_branches=True)
    assert played(asked, ALL)[0] == [0, 4, 4]
    assert played(asked, budget)[0] == [0, 4, 7]


def test_a_newer_one_replaces_those_that_it_extends() -> None:
    asked = [(0, [*range(10)]), (0, [*range(12)]), (0, [*range(9), 70, 71])]
    hits, checkpoints = played(asked, dataclasses.replace(ALL, supersedes=True))
    assert hits == [0, 10, 0], "those at 4 and 8 were extended"
    assert checkpoints.held_at_ends == [2], "one for each of two ends"


@pytest.mark.parametrize("victim", Victim)
@pytest.mark.parametrize("limit", [1, 3])
def test_a_session_never_has_more_than_its_budget_and_always_its_last_end(victim: Victim, limit: int) -> None:
    asked = [(0, [*range(stop)]) for stop in range(9, 60, 5)]
    hits, checkpoints = played(asked, dataclasses.replace(ALL, per_session=limit, victim=victim))
    assert checkpoints.held_at_ends == [limit]
    assert hits == [0, *range(9, 55, 5)]


def test_the_smallest_gap_keeps_them_spread_and_lru_keeps_the_last() -> None:
    asked = [(0, [*range(40)]), (0, [*range(18), 70])]
    spread, last = (
        played(asked, dataclasses.replace(ALL, per_session=4, victim=victim))[0][1]
        for victim in (Victim.GAP, Victim.LRU)
    )
    assert spread >= 8 and last == 0


def test_a_gap_is_measured_on_the_prompts_own_way() -> None:
    """A new chain's checkpoints stay, though an old chain has some at the same positions."""
    asked = [(0, [*range(16)]), (0, [*range(50, 66)]), (0, [*range(50, 59), 99])]
    budget = dataclasses.replace(ALL, per_session=3, victim=Victim.GAP)
    assert played(asked, budget)[0] == [0, 0, 8]


def test_another_sessions_checkpoint_in_between_shortens_a_gap() -> None:
    """At 20 a checkpoint has a gap of 8, until one at 16 comes; then the one at 25 has the larger gap."""
    budget = Budget("ends", interval_token_count=0, at_heads=False, per_session=3, victim=Victim.GAP)
    own = [(0, [*range(stop)]) for stop in (12, 20, 25, 32)]
    probe = (2, [*range(23), 99])
    assert played([*own, probe], budget)[0][-1] == 20
    assert played([*own[:2], (1, [*range(16)]), *own[2:], probe], budget)[0][-1] == 16


def test_those_on_blocks_that_several_sessions_use_count_for_nobody() -> None:
    asked = [(n, [*range(9), *range(100 * n, 100 * n + 40)]) for n in range(1, 4)]
    counted = dataclasses.replace(ALL, per_session=2)
    free = dataclasses.replace(counted, spares_shared=True)
    assert played(asked, counted)[0] == [0, 0, 0]
    hits, checkpoints = played(asked, free)
    assert hits == [0, 0, 8] and checkpoints.shared_count == 2
    assert checkpoints.held_at_ends == [2, 2, 2]


def test_checkpoints_take_space_and_go_with_their_blocks() -> None:
    asked = [(n, [n * 100 + place for place in range(8)]) for n in range(4)]
    twice = [*asked, *asked]
    # Eight blocks and two checkpoints of four blocks each: two such prompts fit.
    limits = Limits(32, 32)
    hits, checkpoints = played([*asked, asked[3], asked[2], asked[1]], ALL, limits, size_blocks=4)
    assert hits == [0, 0, 0, 0, 8, 8, 0]
    assert checkpoints.block_count == 16
    assert played(twice, ALL, Limits(64, 64), size_blocks=4)[0] == [0] * 4 + [8] * 4


@pytest.mark.parametrize("seed", range(5))
def test_all_checkpoints_hit_what_a_plain_search_finds(seed: int) -> None:
    trace, prompts = random_trace(seed)
    asked = [(each.session, prompt) for each, prompt in zip(trace.requests, prompts, strict=True)]
    known: set[Block] = set()
    taken: set[Block] = set()
    expected = []
    for _, prompt in asked:
        blocks = blocks_of(prompt)
        here = list(itertools.takewhile(known.__contains__, blocks))
        reached = max((len(block) for block in here if block in taken), default=0)
        expected.append(reached)
        taken |= {b for b in blocks[reached:] if len(b) % 4 == 0 or b == blocks[-1]}
        known |= set(blocks)
    assert played(asked, ALL)[0] == expected and sum(expected) > 0


def test_every_compared_rule_has_a_name_of_its_own_and_no_budget_hits_more_than_all_with_branches() -> None:
    compared = budgets([8, 4])
    assert len({budget.name for budget in compared}) == len(compared)
    trace, _ = random_trace(7)
    replay = Replay(trace)
    budget = Budget("most", interval_token_count=BLOCK)
    most = replay.play_checkpoints(budget, EVERYTHING, size_blocks=0).hit_rate
    lru = replay.play(Rule.LRU, EVERYTHING).hit_rate
    assert most == pytest.approx(lru), "with one at each block nothing is lost"
    for each in compared:
        assert replay.play_checkpoints(each, EVERYTHING, size_blocks=0).hit_rate <= most
