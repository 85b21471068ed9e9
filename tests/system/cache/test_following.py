"""Identical prompts at the same time: one prefill, and the others start from its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.events import Finished
from icehouse_server.domain.ids import RequestId
from icehouse_server.domain.request import CacheUse

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import BLOCK, CacheServer


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_identical_prompts_at_once_are_computed_once(tmp_path: Path, architecture: str) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    tokens = [3 + (i * 7 + i * i) % 290 for i in range(6 * BLOCK + 5)]
    names = [f"r{i}" for i in range(4)]
    with CacheServer(folder, None) as served:
        for name in names:
            served.submit(name, tokens)
        answers = [served.answer(name) for name in names]
        engine, _ = served.stats()
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert answers[0].cache.cached_token_count == 0
    assert all(answer.cache.ram_token_count >= 6 * BLOCK for answer in answers[1:])
    assert engine.prefilled_token_total <= len(tokens) + 3 * BLOCK


@pytest.mark.parametrize("architecture", ["llama", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("count", [5, 6 * BLOCK + 1, 6 * BLOCK + 9])
def test_equal_prompts_share_all_but_the_last_token(tmp_path: Path, architecture: str, count: int) -> None:
    """Also within a block, and where only the end of a prompt can be resumed from."""
    folder = tiny_model_dir(tmp_path, architecture)
    tokens = [3 + (i * 7 + i * i) % 290 for i in range(count)]
    with CacheServer(folder, None) as served:
        for name in ("leader", "follower"):
            served.submit(name, tokens)
        leader, follower = served.answer("leader"), served.answer("follower")
        engine, _ = served.stats()
    assert follower.tokens == leader.tokens
    assert (leader.cache.cached_token_count, follower.cache.cached_token_count) == (0, count - 1)
    assert engine.prefilled_token_total == count - 1


def test_a_follower_waits_for_the_prompt_and_not_for_the_output(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    with CacheServer(folder, None) as served:
        served.submit("leader", range(3, 40), max_output_tokens=3000)
        served.submit("follower", range(3, 40), max_output_tokens=1)
        assert served.answer("follower").cache.cached_token_count == 36
        assert not isinstance(served.recorder.events["leader"][-1], Finished)
        served.engine.cancel(RequestId("leader"))


def test_a_cancelled_leader_leaves_its_followers_running(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    tokens = [3 + (i * 7 + i * i) % 290 for i in range(20 * BLOCK + 5)]
    with CacheServer(folder, None) as served:
        served.submit("leader", tokens, max_output_tokens=100)
        served.submit("follower", tokens)
        served.engine.cancel(RequestId("leader"))
        served.recorder.wait_for_end("leader")
        followed = served.answer("follower")
        alone = served.ask("alone", tokens, cache_use=CacheUse.OFF)
    assert followed.tokens == alone.tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_crowd_shares_a_prefix_to_the_token_and_reads_it_once_after_a_restart(
    tmp_path: Path, architecture: str
) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    shared = [3 + (i * 7 + i * i) % 290 for i in range(6 * BLOCK + BLOCK // 2)]
    prompts = {f"r{i}": [*shared, 5 + i, *range(20, 20 + BLOCK)] for i in range(4)}
    outputs: list[list[list[int]]] = []
    for _ in range(2):
        with CacheServer(folder, tmp_path / "blocks") as served:
            for name, tokens in prompts.items():
                served.submit(name, tokens)
            answers = [served.answer(name) for name in prompts]
            outputs.append([answer.tokens for answer in answers])
        assert all(answer.cache.cached_token_count >= len(shared) for answer in answers[1:])
    with CacheServer(folder, None) as served:
        outputs.append([served.ask(name, tokens).tokens for name, tokens in prompts.items()])
    assert outputs[0] == outputs[1] == outputs[2]
    assert answers[0].cache.ssd_token_count and sum(a.cache.ram_token_count for a in answers[1:])
