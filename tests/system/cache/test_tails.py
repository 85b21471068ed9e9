"""Tails of prompts: cut for who asks for them while their sequence draws, and at its end for everybody."""

from __future__ import annotations

import pytest
from icehouse_server.domain.ids import Tenant
from icehouse_server.engine.core.sequence import Phase
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts

from tests.system.cache.stepped_server import (
    BLOCK,
    HYBRID,
    KV,
    SHORT_WINDOWS,
    STATE_ONLY,
    WINDOWS,
    SteppedServer,
    expected_tokens,
)

PROMPT = [*range(40, 40 + 2 * BLOCK), 7, 8]
"""Two blocks, a tail of one, and the last token, which every start runs again."""


def step_until_drawing(server: SteppedServer, *, count: int = 1) -> None:
    """Step until so many sequences draw."""
    for _ in range(100):
        if server.scheduler.decoding_count == count:
            return
        server.loop.step()
    raise AssertionError("nobody draws")


def test_a_tail_stays_where_it_is_while_its_sequence_draws() -> None:
    with SteppedServer() as server:
        server.submit("first", PROMPT, max_output_tokens=3)
        step_until_drawing(server)
        assert sorted(server.ram_starts()) == [0, BLOCK]
        server.step_until_idle()
        assert sorted(server.ram_starts()) == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]


@pytest.mark.parametrize("facts", [KV, WINDOWS, SHORT_WINDOWS, HYBRID, STATE_ONLY], ids=str)
@pytest.mark.parametrize("output_count", [1, 2, 3, 40])
def test_the_same_prompt_starts_behind_the_tail_of_one_that_draws(
    facts: CacheFacts, output_count: int
) -> None:
    with SteppedServer(facts=facts) as server:
        server.submit("first", PROMPT, max_output_tokens=60)
        step_until_drawing(server)
        for _ in range(output_count):
            server.loop.step()
        again = server.ask("again", PROMPT)
        assert again.cache.ram_token_count == len(PROMPT) - 1
        server.check()


def test_one_tail_is_cut_for_all_who_share_it() -> None:
    """Tails of which each begins like the others: the first newcomer has one kept, the next ones use it."""
    with SteppedServer(chunk=100, block=32) as server:
        for number in range(4):
            server.submit(f"drawing-{number}", [*PROMPT, 20 + number, 30], max_output_tokens=60)
            step_until_drawing(server, count=number + 1)
            assert server.runner.cut_count == (1 if number else 0)
        server.step_until_idle()
        reused = [server.answer(f"drawing-{number}").cache.ram_token_count for number in range(4)]
        assert reused == [0, *[len(PROMPT)] * 3]


def test_who_waits_for_the_tail_has_it_when_the_prompt_is_through() -> None:
    with SteppedServer() as server:
        server.submit("first", PROMPT, max_output_tokens=60)
        server.submit("second", PROMPT, max_output_tokens=1)
        for _ in range(12):
            server.loop.step()
        assert server.answer("second").cache.ram_token_count == len(PROMPT) - 1
        assert server.scheduler.decoding_count == 1, "the first one draws on"


@pytest.mark.parametrize("step_count", range(1, 9))
def test_what_a_cancelled_prompt_computed_is_kept_with_its_tail(step_count: int) -> None:
    with SteppedServer() as server:
        server.submit("first", PROMPT, max_output_tokens=60)
        for _ in range(step_count):
            server.loop.step()
        (sequence,) = server.scheduler.running
        reached = sequence.processed_token_count
        is_drawing = sequence.phase is Phase.DECODING
        server.cancel("first")
        again = server.ask("again", [*PROMPT, 1, 2])
        assert again.cache.ram_token_count >= reached
        assert is_drawing or again.cache.ram_token_count == reached


@pytest.mark.parametrize("step_count", [5, 6, 9, 12])
def test_a_parked_sequence_goes_on_from_its_tail(step_count: int) -> None:
    with SteppedServer() as server:
        server.submit("first", PROMPT, max_output_tokens=20)
        for _ in range(step_count):
            server.loop.step()
        (sequence,) = server.scheduler.running
        computed_count = sequence.processed_token_count
        server.loop._park(sequence)
        server.step_until_idle()
        assert server.answer("first").tokens == expected_tokens(PROMPT, 20)
        assert server.loop.stats().prefilled_token_total <= computed_count + BLOCK, "it starts anew"


def test_a_prompt_that_draws_nothing_leaves_its_tail() -> None:
    with SteppedServer() as server:
        server.submit("warm", PROMPT, max_output_tokens=0)
        server.step_until_idle()
        assert sorted(server.ram_starts()) == [0, BLOCK, 2 * BLOCK]


def test_nothing_is_cut_for_another_tenant() -> None:
    with SteppedServer() as server:
        server.submit("first", PROMPT, max_output_tokens=60)
        step_until_drawing(server)
        other = server.ask("other", PROMPT, tenant=Tenant("b"))
        assert other.cache.cached_token_count == 0
