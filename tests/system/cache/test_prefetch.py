"""What is computed ahead for a session's next turn: found by it, counted by itself, and in nobody's way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from icehouse_server.domain.cache_stats import PrefetchStats
from icehouse_server.domain.events import PrefillProgress
from icehouse_server.domain.ids import RequestId
from icehouse_server.engine.core.mailbox import Cancel
from icehouse_server.engine.core.refusals import cancelled_by_client

from tests.system.cache.stepped_server import (
    BLOCK,
    HYBRID,
    KV,
    STATE_ONLY,
    WINDOWS,
    SteppedServer,
    prompt,
)

FIRST = prompt(3 * BLOCK + 1)
HISTORY = [*FIRST[: 2 * BLOCK + 1], *prompt(3 * BLOCK, salt=5)]
"""How the next prompt begins: the template writes the rest of the first one, and its reply, anew."""
MESSAGE = prompt(BLOCK + 1, salt=6)


def ahead(served: SteppedServer, tokens: list[int]) -> None:
    """Compute a prompt ahead. Its last token, which is not kept, may be any."""
    served.ask("ahead", [*tokens, 1], max_output_tokens=0, session_id="s", is_prefetch=True)


@pytest.mark.parametrize(
    "facts", [KV, dataclasses.replace(KV, shares_blocks=True), WINDOWS, HYBRID, STATE_ONLY]
)
def test_the_next_turn_computes_its_message_alone(facts) -> None:
    with SteppedServer(facts=facts, session_checkpoint_limit=8) as served:
        served.ask("first", FIRST, session_id="s")
        ahead(served, HISTORY)
        told = served.stats().prefetch
        assert (told.done_total, told.given_up_total, told.used_token_total) == (1, 0, 0)
        assert told.computed_token_total >= 3 * BLOCK
        next_turn = [*HISTORY, *MESSAGE]
        assert served.ask("next", next_turn, session_id="s").cache.cached_token_count == len(HISTORY)
        used = served.stats().prefetch.used_token_total
        assert 3 * BLOCK <= used <= told.computed_token_total
        served.ask("again", next_turn, session_id="s")
        assert served.stats().prefetch.used_token_total == used, "each counts once"
        served.check()


def test_it_is_no_request_to_any_other_counter() -> None:
    with SteppedServer() as served:
        served.ask("first", FIRST, session_id="s")
        before, lookups = served.loop.stats(), served.stats().lookups
        ahead(served, HISTORY)
        after = served.loop.stats()
        for name in ("accepted", "finished", "cancelled", "prompt_token", "cached_token"):
            assert getattr(after, f"{name}_total") == getattr(before, f"{name}_total"), name
        assert served.stats().lookups == lookups


def test_who_comes_meanwhile_waits_for_no_pass_more_and_what_was_computed_stays() -> None:
    with SteppedServer() as served:
        long = prompt(40 * BLOCK)
        served.submit("ahead", long, max_output_tokens=0, session_id="s", is_prefetch=True)
        for _ in range(6):
            served.loop.step()
        computed = 5 * BLOCK
        served.mailbox.post(Cancel(RequestId("ahead"), cancelled_by_client()))
        served.submit("comes", prompt(3 * BLOCK, salt=9), max_output_tokens=1)
        served.loop.step()
        progress = [e for e in served.recorder.events["comes"] if isinstance(e, PrefillProgress)]
        assert progress and progress[0].processed_token_count == BLOCK, "its first chunk is in the next pass"
        served.step_until_idle()
        told = served.stats().prefetch
        assert (told.done_total, told.given_up_total) == (0, 1)
        assert computed <= told.computed_token_total <= 8 * BLOCK
        went_on = served.ask("next", long, max_output_tokens=1, session_id="s")
        assert went_on.cache.cached_token_count == told.computed_token_total
        assert served.stats().prefetch.used_token_total == told.computed_token_total
        served.check()


def test_a_later_prefetch_is_no_use(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        ahead(served, HISTORY)
        ahead(served, [*HISTORY, *MESSAGE])
        assert served.stats().prefetch == PrefetchStats(
            done_total=2, computed_token_total=len(HISTORY) + len(MESSAGE)
        )
        served.check()


def test_blocks_that_were_there_before_are_not_counted_as_its_own(tmp_path: Path) -> None:
    with SteppedServer(tmp_path) as served:
        served.ask("first", FIRST, session_id="s", max_output_tokens=1)
        ahead(served, FIRST)
        served.ask("next", [*FIRST, *MESSAGE], session_id="s", max_output_tokens=1)
        told = served.stats().prefetch
        assert told.used_token_total == told.computed_token_total <= 1
