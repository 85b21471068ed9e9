"""Sessions: what an ended one alone has used goes first, and how many checkpoints one keeps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.domain.cache_commands import EndSession, Explain, Explanation, SessionEndReport
from icehouse_server.domain.ids import CacheScope, Tenant
from icehouse_server.engine.prefix_cache.tiers.node import Node
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts
from icehouse_server.storage.local.directory.disk_index import DiskIndex

from tests.system.cache.stepped_server import (
    BLOCK,
    BLOCK_BYTES,
    HYBRID,
    STATE_ONLY,
    SteppedServer,
    prompt,
)


def _cached(served: SteppedServer, tokens: list[int]) -> int:
    """Return how much of a prompt would be reused."""
    answer = served.order(Explain(tuple(tokens)))
    assert isinstance(answer, Explanation)
    return answer.cache.cached_token_count


def _index_of(served: SteppedServer) -> DiskIndex:
    return served.storage._store.index


def test_an_ended_session_makes_space_before_one_that_is_used_less_recently() -> None:
    with SteppedServer(ram_blocks=8) as served:
        served.ask("a", prompt(3 * BLOCK + 1, salt=1), max_output_tokens=0, session_id="a")
        served.ask("b", prompt(3 * BLOCK + 1, salt=2), max_output_tokens=0, session_id="b")
        assert served.order(EndSession("b")) == SessionEndReport(block_count=3, ram_bytes=3 * BLOCK_BYTES)
        served.ask("c", prompt(4 * BLOCK + 1, salt=3), max_output_tokens=0, session_id="c")
        assert _cached(served, prompt(3 * BLOCK + 1, salt=1)) == 3 * BLOCK
        assert _cached(served, prompt(3 * BLOCK + 1, salt=2)) == BLOCK
        assert served.stats().sessions.session_count == 3 and served.stats().sessions.ended_count == 1
        served.check()


@pytest.mark.parametrize("by_request", [True, False])
def test_a_session_ends_with_its_last_request_as_by_order(by_request: bool) -> None:
    with SteppedServer(ram_blocks=8) as served:
        tokens = prompt(3 * BLOCK + 1, salt=1)
        served.ask("a", tokens, max_output_tokens=2, session_id="a", ends_session=by_request)
        other = prompt(3 * BLOCK + 1, salt=2)
        served.ask("b", other, max_output_tokens=1)
        if not by_request:
            served.order(EndSession("a"))
        assert served.ram_starts()[:4] == [3 * BLOCK, 2 * BLOCK, BLOCK, 0]
        assert served.stats().sessions.ended_total == 1


def test_a_request_that_fails_does_not_end_its_session() -> None:
    with SteppedServer() as served:
        served.submit("a", prompt(BLOCK + 1), max_output_tokens=50, session_id="a", ends_session=True)
        for _ in range(4):
            served.loop.step()
        served.cancel("a")
        served.step_until_idle()
        assert served.stats().sessions.ended_total == 0


def test_another_tenants_session_of_the_same_name_is_another_one() -> None:
    with SteppedServer() as served:
        served.ask("a", prompt(2 * BLOCK + 1), session_id="s", tenant=Tenant("a"))
        assert served.order(EndSession("s", Tenant("b"))) == SessionEndReport()
        answer = served.order(EndSession("s", Tenant("a")))
        assert isinstance(answer, SessionEndReport) and answer.block_count == 3


def test_explain_tells_which_session_a_block_belongs_to_until_another_uses_it() -> None:
    with SteppedServer() as served:
        tokens = prompt(3 * BLOCK + 1)
        served.ask("a", tokens, max_output_tokens=1, session_id="a")
        served.ask("b", [*tokens[: 2 * BLOCK], 1, 2], max_output_tokens=1, session_id="b")
        answer = served.order(Explain(tuple(tokens)))
        assert isinstance(answer, Explanation)
        key = served.cache.sessions.key_of(Tenant(""), "a")
        assert [block.session for block in answer.blocks] == [None, None, key]


def test_explain_tells_nobody_of_another_tenants_session() -> None:
    with SteppedServer() as served:
        tokens = tuple(prompt(2 * BLOCK + 1))
        served.ask("a", tokens, max_output_tokens=0, session_id="a", tenant=Tenant("a"))
        shared = CacheScope(Tenant("a"))
        answer = served.order(Explain(tokens, CacheScope(Tenant("b")), shared_scope=shared))
        assert isinstance(answer, Explanation)
        assert [block.session for block in answer.blocks] == [None, None]
        own = served.order(Explain(tokens, shared))
        assert isinstance(own, Explanation) and None not in [block.session for block in own.blocks]


def test_an_ended_session_goes_first_from_ssd_and_what_is_not_there_is_not_written(tmp_path: Path) -> None:
    with SteppedServer(tmp_path, spill_policy="write_behind", ram_blocks=4) as served:
        for name in ("a", "b"):
            served.ask(name, prompt(2 * BLOCK + 1, salt=ord(name)), max_output_tokens=0, session_id=name)
            if name == "a":
                served.order(EndSession(name))
            served.write_behind()
        ended = [node.hash for node in served.cache.tree if served.cache.sessions.has_ended(node)]
        assert len(ended) == 2 and len(_index_of(served)) == 2, "of b alone, which goes on"
        served.order(EndSession("b"))
        served.ask("c", prompt(4 * BLOCK + 1, salt=3), max_output_tokens=0, session_id="c")
        served.write_behind()
        going = []
        while (victim := _index_of(served).next_victim()) is not None:
            node = served.cache.tree.get(victim.hash)
            assert node is not None
            going.append((served.cache.sessions.has_ended(node), victim.start_token_index))
            _index_of(served).remove(victim.hash)
        own = [start for is_ended, start in going if is_ended]
        assert [is_ended for is_ended, _ in going] == sorted((e for e, _ in going), reverse=True)
        assert own == [BLOCK, 0] and len(going) == 6
        assert _cached(served, prompt(2 * BLOCK + 1, salt=ord("a"))) == 0


# The budget of checkpoints.


def _with_checkpoint(nodes: Iterable[Node]) -> list[int]:
    return sorted(node.end_token_index for node in nodes if RegionKind.CHECKPOINT in (*node.ram, *node.ssd))


def _reused_by_turns(facts: CacheFacts, *, limit: int) -> tuple[list[int], int]:
    """Play a conversation; return what each turn reused, and how many checkpoints there are at its end."""
    reused = []
    with SteppedServer(facts=facts, session_checkpoint_limit=limit) as served:
        tokens = prompt(2 * BLOCK + 3)
        for _ in range(8):
            answer = served.ask("turn", tokens, max_output_tokens=BLOCK + 2, session_id="agent")
            reused.append(answer.cache.cached_token_count)
            tokens = [*tokens, *answer.tokens, 7, 8, 9]
            served.check()
        return reused, len(_with_checkpoint(served.cache.tree))


@pytest.mark.parametrize("facts", [HYBRID, STATE_ONLY])
def test_a_conversation_reuses_as_much_with_a_few_checkpoints_as_with_all(facts: CacheFacts) -> None:
    few, few_count = _reused_by_turns(facts, limit=3)
    every, every_count = _reused_by_turns(facts, limit=0)
    assert few == every and few[-1] > 4 * few[1]
    assert few_count == 3 and every_count > 20


@pytest.mark.parametrize("facts", [HYBRID, STATE_ONLY])
def test_a_prompt_is_found_again_whatever_its_long_reply_left(facts: CacheFacts) -> None:
    with SteppedServer(facts=facts, session_checkpoint_limit=2, checkpoint_interval_tokens=BLOCK) as served:
        tokens = prompt(3 * BLOCK + 2)
        served.ask("first", tokens, max_output_tokens=9 * BLOCK, session_id="agent")
        assert _cached(served, tokens) == len(tokens) - 1
        assert len(_with_checkpoint(served.cache.tree)) == 2


def test_without_a_session_every_checkpoint_stays() -> None:
    with SteppedServer(facts=HYBRID, session_checkpoint_limit=2, checkpoint_interval_tokens=BLOCK) as served:
        served.ask("first", prompt(9 * BLOCK + 2), max_output_tokens=1)
        assert len(_with_checkpoint(served.cache.tree)) == 11


@pytest.mark.parametrize("facts", [HYBRID, STATE_ONLY])
def test_ram_ssd_and_cold_say_the_same_under_a_small_budget(tmp_path: Path, facts: CacheFacts) -> None:
    turns: list[list[int]] = [prompt(2 * BLOCK + 3)]
    for life in range(3):
        with SteppedServer(
            tmp_path,
            facts=facts,
            session_checkpoint_limit=2,
            checkpoint_interval_tokens=BLOCK,
            ram_blocks=(1000, 6, 0)[life],
            spill_policy="write_behind",
        ) as served:
            for turn in range(4):
                tokens = turns[-1]
                answer = served.ask("turn", tokens, max_output_tokens=BLOCK + 1, session_id="agent")
                turns.append([*tokens, *answer.tokens, 3 + turn])
                served.check()
            if life:
                assert served.stats().lookups.ssd_token_total > 0
