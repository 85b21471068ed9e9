"""The prefix cache in the real loop, step by step: plans, captures, spills and loads that cross."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from icehouse_server.domain import blocks
from icehouse_server.domain.events import Failed, Finished, ReuseLimit
from icehouse_server.domain.ids import BlockHash, SequenceId
from icehouse_server.domain.request import CacheUse
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
    prompt,
)

ALL_FACTS = pytest.mark.parametrize(
    "facts",
    [KV, WINDOWS, SHORT_WINDOWS, HYBRID, STATE_ONLY],
    ids=["kv", "windows", "short", "hybrid", "state"],
)


@ALL_FACTS
@pytest.mark.parametrize("chunk", [BLOCK // 2, BLOCK, 2 * BLOCK])
def test_cold_ram_ssd(tmp_path: Path, facts: CacheFacts, chunk: int) -> None:
    tokens = prompt(5 * BLOCK + 3)
    with SteppedServer(tmp_path, facts=facts, chunk=chunk) as served:
        cold = served.ask("cold", tokens)
        ram = served.ask("ram", tokens)
        served.check()
    with SteppedServer(tmp_path, facts=facts, chunk=chunk) as served:
        ssd = served.ask("ssd", tokens)
        served.check()
    assert cold.cache.limit is ReuseLimit.NO_MATCH and cold.cache.cached_token_count == 0
    assert ram.cache.ram_token_count == len(tokens) - 1
    assert ssd.cache.ssd_token_count == len(tokens) - 1


@ALL_FACTS
def test_callers_are_told_before_blocks_are_copied(tmp_path: Path, facts: CacheFacts) -> None:
    """The copy of a long tail takes as long as some passes."""
    tokens = prompt(2 * BLOCK + 3)
    with SteppedServer(tmp_path, facts=facts) as served:
        cut, told = served.runner.cut, []

        def watched(sequence_id: SequenceId, *, stop: int, **wanted: Any) -> Any:
            told.append((stop, served.recorder.tokens_of("a"), served.recorder.end_of("a")))
            return cut(sequence_id, stop=stop, **wanted)

        served.runner.cut = watched  # type: ignore[method-assign]
        served.submit("a", tokens, max_output_tokens=2)
        served.submit("waits", tokens, cache_use=CacheUse.READ_ONLY)
        served.step_until_idle()
        stop, drawn, end = told[-1]
        assert stop > len(tokens) and len(drawn) == 2 and isinstance(end, Finished)
        if facts == KV:
            assert [len(drawn) for stop, drawn, _ in told if stop == len(tokens) - 1] == [1]


@ALL_FACTS
def test_cancelled_between_the_last_chunk_and_the_first_token(tmp_path: Path, facts: CacheFacts) -> None:
    tokens = prompt(2 * BLOCK + 3)
    with SteppedServer(tmp_path, facts=facts) as served:
        served.submit("gone", tokens)
        while not served.runner.decoding:
            served.loop.step()
        assert isinstance(served.cancel("gone"), Failed)
        assert served.ask("again", tokens).cache.ram_token_count == len(tokens) - 1


def test_a_window_from_ssd_before_a_block_from_ssd(tmp_path: Path) -> None:
    tokens = prompt(6 * BLOCK + 1)
    fork = [*tokens[: 3 * BLOCK], *prompt(BLOCK, salt=1)]
    with SteppedServer(tmp_path, facts=WINDOWS) as served:
        served.ask("first", tokens)
    with SteppedServer(tmp_path, facts=WINDOWS) as served:
        # Two blocks come into RAM, without the windows that a restore to the prompt's end did not need.
        served.ask("long", tokens, max_output_tokens=2)
        assert served.ask("fork", fork).cache.cached_token_count == 3 * BLOCK
        served.check()


@pytest.mark.parametrize("facts", [KV, WINDOWS, SHORT_WINDOWS], ids=["kv", "windows", "short"])
@pytest.mark.parametrize("chunk", [BLOCK, 2 * BLOCK])
def test_a_crowd_computes_what_it_shares_once_up_to_where_its_prompts_part(
    facts: CacheFacts, chunk: int
) -> None:
    shared = prompt(5 * BLOCK + 3)
    prompts = [[*shared, 60 + i, *prompt(2 * BLOCK, salt=i)] for i in range(6)]
    with SteppedServer(facts=facts, chunk=chunk) as served:
        for i, tokens in enumerate(prompts):
            served.submit(f"r{i}", tokens)
        served.step_until_idle()
        for i, tokens in enumerate(prompts):
            answer = served.answer(f"r{i}")
            assert answer.tokens == expected_tokens(tokens, len(answer.tokens))
            assert answer.cache.cached_token_count == (len(shared) if i else 0)
        own_count = sum(len(tokens) - 1 - len(shared) for tokens in prompts)
        assert served.loop.stats().prefilled_token_total == len(shared) + own_count
        served.check()


def test_who_follows_to_where_prompts_part_does_not_wait_for_the_leader_to_end() -> None:
    shared = prompt(2 * BLOCK + 2)
    with SteppedServer() as served:
        served.submit("leader", [*shared, *prompt(20 * BLOCK, salt=1)])
        served.submit("follower", [*shared, 90, 91])
        while served.scheduler.decoding_count == 0:
            served.loop.step()
        assert [s.request.request_id for s in served.scheduler.decoding] == ["follower"]
        served.step_until_idle()
        assert served.answer("follower").cache.ram_token_count == len(shared)


def test_a_follower_begins_in_the_step_after_its_leader_ended_though_nothing_else_runs() -> None:
    with SteppedServer() as served:
        tokens = prompt(2 * BLOCK + 3)
        served.submit("warm", tokens, max_output_tokens=0)
        served.loop.step()
        served.submit("follows", tokens)
        waits: list[bool] = []
        while served.recorder.end_of("follows") is None:
            waits.append(served.loop.is_idle)
            served.loop.step()
        assert not any(waits), "the loop never waited for a message"
        assert served.answer("follows").cache.ram_token_count == len(tokens) - 1


@ALL_FACTS
def test_a_block_s_name_is_computed_once(
    tmp_path: Path, facts: CacheFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked for: to be planned, followed, led and captured, and by whoever comes next."""
    tokens = prompt(5 * BLOCK + 3)
    computed: Counter[tuple[BlockHash, tuple[int, ...]]] = Counter()
    really = blocks.block_hash

    def counted(*, parent: BlockHash, token_ids: tuple[int, ...], **rest: Any) -> BlockHash:
        computed[parent, tuple(token_ids)] += 1
        return really(parent=parent, token_ids=token_ids, **rest)

    monkeypatch.setattr(blocks, "block_hash", counted)
    with SteppedServer(facts=facts) as served:
        for name in ("leads", "follows"):
            served.submit(name, tokens, max_output_tokens=3)
        served.step_until_idle()
        served.ask("again", [*tokens, *served.answer("leads").tokens, 5])
        served.check()
    assert len(computed) >= 6 and set(computed.values()) == {1}
