"""The simulated fleet: its sessions, its workers' arithmetic, what routing keeps of the hits, the seed."""

from __future__ import annotations

import dataclasses

import pytest

from bench.fleet.growth import load_rows, question_of, ram_rows, routing_rows
from bench.fleet.sessions import Session, Shape, Turn, last_token_counts, make_sessions, tokens_of
from bench.fleet.simulated_worker import Costs, PrefixKey, Reuse, SimulatedWorker, Tier, agent_key
from bench.fleet.simulation import Outcome, Routing, simulate, start_times
from bench.server_process import ROOT

GIB = 1 << 30
COSTS = Costs(
    prefill_tokens_per_s=1000,
    decode_tokens_per_s=100,
    restore_tokens_per_s=10_000,
    kv_bytes_per_token=1,
    block_token_count=100,
    ram_bytes=GIB,
    ssd_bytes=GIB,
    gateway_s=0.01,
)
AGENT, SESSION, OTHER = agent_key(0), PrefixKey(0), PrefixKey(1)


def outcome(
    session_count: int = 60,
    *,
    worker_count: int = 1,
    routing: Routing = Routing.CACHE_AWARE,
    costs: Costs = COSTS,
    load: float = 0.5,
    seed: int = 1,
) -> Outcome:
    shape = Shape()
    sessions = make_sessions(session_count, shape, seed=seed)
    starts_s = start_times(sessions, shape, costs, worker_count=worker_count, load=load, seed=seed)
    return simulate(sessions, starts_s, shape, costs, worker_count=worker_count, routing=routing)


def test_sessions_have_the_shape_of_agents() -> None:
    for seed in range(3):
        tokens = tokens_of(make_sessions(200, Shape(), seed=seed), Shape())
        assert 0.94 <= tokens.hit_rate <= 0.97
        assert 100 <= tokens.prompt_count / tokens.output_count <= 200


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    few, many = (make_sessions(count, Shape(), seed=3) for count in (5, 50))
    assert many[:5] == few != make_sessions(5, Shape(), seed=4)


def test_a_scaled_shape_has_the_same_shares() -> None:
    small = Shape().scaled(1 / 20)
    rates = [tokens_of(make_sessions(200, shape, seed=1), shape).hit_rate for shape in (Shape(), small)]
    assert rates[1] == pytest.approx(rates[0], abs=0.005)


def test_tokens_are_counted_turn_by_turn() -> None:
    shape = Shape(agent_count=1, agent_token_count=100)
    session = Session(0, (Turn(10, 5, 0.0), Turn(20, 5, 1.0)))
    tokens = tokens_of([session], shape)
    assert (tokens.prompt_count, tokens.new_count, tokens.output_count) == (110 + 135, 130, 10)
    assert last_token_counts([session], shape) == [140]


def test_a_tier_lets_go_of_what_was_used_least_recently() -> None:
    tier = Tier(100)
    assert tier.put(SESSION, 50) == tier.put(OTHER, 40) == []
    assert tier.put(SESSION, 55) == []
    assert tier.put(AGENT, 30) == [(OTHER, 40)]
    assert tier.items() == [(SESSION, 55), (AGENT, 30)]


def test_a_prefix_counts_from_its_first_token_and_in_whole_blocks() -> None:
    worker = SimulatedWorker(COSTS)
    worker.keep(SESSION, 950)
    assert worker.known(AGENT, SESSION) == Reuse(0, 0), "the instructions before it are not there"
    worker.keep(AGENT, 570)
    assert worker.known(AGENT, SESSION) == Reuse(1500, 0)
    assert worker.known(AGENT, OTHER) == Reuse(500, 0)


def test_what_ram_lets_go_of_is_on_ssd_and_written_once() -> None:
    worker = SimulatedWorker(dataclasses.replace(COSTS, ram_bytes=1000))
    worker.keep(AGENT, 400)
    worker.keep(SESSION, 500)
    assert worker.written_token_count == 0
    worker.keep(OTHER, 600)
    assert worker.written_token_count == 900
    assert worker.known(AGENT, SESSION) == Reuse(0, 900)
    worker.keep(AGENT, 400)
    worker.keep(SESSION, 550)
    assert worker.written_token_count == 1500, "the other session's, and nothing of what was there"
    worker.flush()
    assert worker.written_token_count == 1550, "what the session has grown by"


def test_what_leaves_both_tiers_is_said_to_be_lost() -> None:
    worker = SimulatedWorker(dataclasses.replace(COSTS, ram_bytes=100, ssd_bytes=100))
    assert worker.keep(SESSION, 100) == worker.keep(OTHER, 100) == []
    assert worker.keep(AGENT, 100) == [SESSION]


def test_a_request_takes_what_its_parts_cost() -> None:
    worker = SimulatedWorker(COSTS)
    times = worker.serve(Reuse(300, 500), now_s=10.0, prompt_token_count=1000, output_token_count=50)
    # 0.05 s for 500 tokens from SSD, 0.2 s for 200 computed ones, 0.5 s for 50 drawn ones.
    assert times == pytest.approx((10.25, 10.75))
    # The next one waits for the computing, and is fetched from SSD meanwhile.
    times = worker.serve(Reuse(0, 1000), now_s=10.5, prompt_token_count=1100, output_token_count=10)
    assert times == pytest.approx((10.8, 10.9))
    assert worker.busy_s == pytest.approx(0.7 + 0.2)


def test_one_worker_that_forgets_nothing_reuses_all_but_parts_of_blocks() -> None:
    found = outcome()
    sessions = make_sessions(60, Shape(), seed=1)
    tokens = tokens_of(sessions, Shape())
    lost = tokens.hit_rate - found.hit_rate
    assert 0 <= lost <= COSTS.block_token_count * found.request_count / tokens.prompt_count
    assert found.request_count == sum(len(session.turns) for session in sessions)
    # Everything is written once: what was sent, and what was answered.
    assert found.written_bytes == tokens.new_count + tokens.output_count


def test_small_tiers_cost_hits_and_a_large_ssd_saves_them() -> None:
    small = dataclasses.replace(COSTS, ram_bytes=50_000, ssd_bytes=50_000)
    large = dataclasses.replace(small, ssd_bytes=GIB)
    assert outcome(costs=small).hit_rate < 0.8 * outcome().hit_rate
    assert outcome(costs=large).hit_rate == pytest.approx(outcome().hit_rate, abs=0.002)
    assert outcome(costs=large).ssd_share > 0.3 > outcome().ssd_share == 0


def test_routing_by_blocks_keeps_the_hits_and_turns_do_not() -> None:
    one = outcome(60)
    aware, turns = (outcome(480, worker_count=8, routing=routing) for routing in Routing)
    assert aware.hit_rate >= 0.97 * one.hit_rate
    assert turns.hit_rate <= 0.9 * one.hit_rate
    assert turns.written_bytes > 3 * aware.written_bytes
    assert turns.ttft_p50_s > aware.ttft_p50_s
    # Sessions of few agents begin where the agent's instructions are, and yet nobody is left without work.
    assert aware.busy_max < 2 * aware.busy_mean


@pytest.mark.parametrize(("spill_count", "stays"), [(64, True), (1, False)])
def test_a_beginning_that_all_share_fills_one_worker_first(spill_count: int, stays: bool) -> None:
    """The busy one of two takes all, up to four requests more than the mean, or to fewer if told so."""
    shape = Shape(agent_count=1)
    turns = (Turn(100, 100, 0.0),)
    sessions = [Session(0, turns) for _ in range(8)]
    found = simulate(
        sessions,
        [0.0] * 8,
        shape,
        COSTS,
        worker_count=2,
        routing=Routing.CACHE_AWARE,
        spill_count=spill_count,
    )
    assert (found.busy_max == pytest.approx(2 * found.busy_mean)) == stays


def test_the_seed_gives_the_run() -> None:
    assert outcome(worker_count=3) == outcome(worker_count=3) != outcome(worker_count=3, seed=2)


def test_more_load_is_more_waiting() -> None:
    waits = [outcome(load=load).ttft_p95_s for load in (0.2, 0.6, 0.95)]
    assert waits == sorted(waits) and waits[-1] > 1.5 * waits[0]


def test_the_page_on_growing_has_the_figures_of_its_command() -> None:
    page = (ROOT / "docs" / "growing.md").read_text(encoding="utf-8").splitlines()
    question = question_of([])
    few = dataclasses.replace(
        question, worker_count=2, session_count=question.session_count * 2 // question.worker_count
    )
    rows = [*load_rows(question), *ram_rows(question), *routing_rows(few)]
    assert [row for row in rows if f"| {' | '.join(row)} |" not in page] == []
