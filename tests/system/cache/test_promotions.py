"""Blocks that were read from SSD are in RAM as soon as their sequence goes on, and nothing is copied."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from icehouse_server.domain.ids import DEFAULT_SCOPE
from icehouse_server.domain.request import CacheUse

from tests.system.cache.stepped_server import BLOCK, HYBRID, KV, STATE_ONLY, WINDOWS, SteppedServer, prompt

TOKENS = prompt(4 * BLOCK)


def store(directory: Path, facts=KV) -> None:
    with SteppedServer(directory, facts=facts) as served:
        served.ask("first", TOKENS)


@pytest.mark.parametrize(
    "facts",
    [
        KV,
        dataclasses.replace(KV, shares_blocks=True),
        WINDOWS,
        dataclasses.replace(HYBRID, shares_blocks=True),
    ],
)
def test_what_was_read_is_in_ram_with_the_first_token(tmp_path: Path, facts) -> None:
    store(tmp_path, facts)
    with SteppedServer(tmp_path, facts=facts) as served:
        again = served.ask("again", TOKENS, max_output_tokens=1)
        assert again.cache.ssd_token_count > 0
        read = [node for node in served.cache.tree if node.ram and node.ssd]
        assert len(read) >= 3
        more = served.ask("more", TOKENS, max_output_tokens=1)
        assert (more.cache.ssd_token_count, more.cache.ram_token_count) == (0, again.cache.cached_token_count)
        served.check()


def test_nothing_that_was_read_is_cut_again(tmp_path: Path) -> None:
    store(tmp_path)
    with SteppedServer(tmp_path) as served:
        served.ask("again", [*TOKENS, 1], max_output_tokens=1)
        assert served.runner.cut_count == 1, "the tail of its own"


def test_who_must_not_write_promotes_nothing(tmp_path: Path) -> None:
    store(tmp_path)
    with SteppedServer(tmp_path) as served:
        served.ask("again", TOKENS, cache_use=CacheUse.READ_ONLY)
        assert not served.cache.tree.ram.block_count


def test_the_head_of_what_was_read_stays_where_ram_has_not_room_for_all(tmp_path: Path) -> None:
    store(tmp_path)
    with SteppedServer(tmp_path, ram_blocks=2) as served:
        assert served.ask("again", TOKENS, max_output_tokens=1).cache.ssd_token_count > 0
        kept = sorted(node.start_token_index for node in served.cache.tree if node.ram)
        assert kept[0] == 0
        served.check()


def test_others_go_for_what_was_read_a_block_a_token_and_not_before_the_first_one(tmp_path: Path) -> None:
    """Each of them is copied to be written, and dropped where too many are."""
    store(tmp_path)
    with SteppedServer(tmp_path, ram_blocks=4) as served:
        served.ask("others", prompt(4 * BLOCK, salt=1), max_output_tokens=1)
        served.ask("one", TOKENS, max_output_tokens=1)
        assert not read_in_ram(served)
        assert served.ask("more", TOKENS, max_output_tokens=3).cache.ssd_token_count > 0
        assert read_in_ram(served) == [0, BLOCK]
        served.check()


@pytest.mark.parametrize(
    "facts",
    [KV, dataclasses.replace(KV, shares_blocks=True), WINDOWS, HYBRID, STATE_ONLY],
)
def test_a_warm_up_brings_into_ram_what_is_on_ssd_and_what_is_missing(tmp_path: Path, facts) -> None:
    store(tmp_path, facts)
    longer = [*TOKENS, *prompt(2 * BLOCK, salt=3)]
    with SteppedServer(tmp_path, facts=facts, ram_blocks=40) as served:
        for salt in range(4, 9):
            served.ask("others", prompt(8 * BLOCK, salt=salt), max_output_tokens=1)
        warmed = served.ask("warm", longer, max_output_tokens=0)
        cached = warmed.cache.ssd_token_count
        assert cached >= 3 * BLOCK and not warmed.cache.ram_token_count
        assert served.usage("warm").promoted_token_count == cached
        again = served.ask("again", longer, max_output_tokens=1)
        assert (again.cache.ssd_token_count, again.cache.ram_token_count) == (0, len(longer) - 1)
        served.check()


def test_a_warm_up_begins_with_the_prompts_head_and_says_what_found_room(tmp_path: Path) -> None:
    store(tmp_path)
    with SteppedServer(tmp_path, ram_blocks=2) as served:
        served.ask("others", prompt(2 * BLOCK, salt=1), max_output_tokens=1)
        assert served.ask("warm", TOKENS, max_output_tokens=0).cache.ssd_token_count == 4 * BLOCK - 1
        assert served.usage("warm").promoted_token_count == 2 * BLOCK
        assert read_in_ram(served) == [0, BLOCK]
        served.check()


def test_no_block_that_a_running_request_uses_goes_for_a_warm_up(tmp_path: Path) -> None:
    facts = dataclasses.replace(KV, shares_blocks=True)
    store(tmp_path, facts)
    with SteppedServer(tmp_path, facts=facts, ram_blocks=5) as served:
        served.submit("runs", prompt(3 * BLOCK + 1, salt=1), max_output_tokens=50)
        while not (held := {node.hash for node in served.cache.tree if node.ram}):
            served.settle_storage()
            served.loop.step()
        served.submit("warm", TOKENS, max_output_tokens=0)
        while served.recorder.end_of("warm") is None:
            served.settle_storage()
            served.loop.step()
        assert served.recorder.end_of("runs") is None
        assert {node.hash for node in served.cache.tree if node.ram} >= held
        assert 0 < served.usage("warm").promoted_token_count <= 2 * BLOCK
        served.step_until_idle()
        served.check()


def read_in_ram(served: SteppedServer) -> list[int]:
    """Return where blocks begin that are in RAM, but for the last one, which is computed again."""
    chain = served.cache.known_chain(TOKENS[: 3 * BLOCK], DEFAULT_SCOPE)
    return [node.start_token_index for node in chain if node.ram]
