"""Checkpoints at borders of messages: a prompt that parts from another there goes on from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.domain.blocks import RegionKind
from icehouse_server.engine.prefix_cache.tiers.runner_port import CacheFacts

from tests.fixtures.models import tiny_model_dir
from tests.system.cache.server import CacheServer
from tests.system.cache.stepped_server import BLOCK, HYBRID, KV, STATE_ONLY, SteppedServer
from tests.system.cache.stepped_server import prompt as stepped_prompt
from tests.system.cache.test_reuse import prompt

SYSTEM_END, LAST_BEGIN = 70, 151
"""Neither is at the end of a block."""
BORDERS = (SYSTEM_END, LAST_BEGIN)
TOKENS = prompt(190)
EDITED = [*TOKENS[: LAST_BEGIN + 2], *prompt(30, salt=5)]
"""Its last message begins with the same header."""
OTHER = [*TOKENS[: SYSTEM_END + 2], *prompt(60, salt=6)]


@pytest.mark.parametrize("architecture", ["falcon_h1", "mamba2", "lfm2"])
def test_an_edit_goes_on_from_the_border_with_the_tokens_of_a_cold_run(
    tmp_path: Path, architecture: str
) -> None:
    folder = tiny_model_dir(tmp_path, architecture)
    with CacheServer(folder, None, is_enabled=False) as served:
        cold = [served.ask(f"{number}", tokens).tokens for number, tokens in enumerate((EDITED, OTHER))]
    with CacheServer(folder, tmp_path / "blocks", checkpoint_interval_tokens=1024) as served:
        served.ask("first", TOKENS, borders=BORDERS)
        edited = served.ask("edited", EDITED)
        other = served.ask("other", OTHER)
    assert edited.cache.cached_token_count == LAST_BEGIN and other.cache.cached_token_count == SYSTEM_END
    assert [edited.tokens, other.tokens] == cold
    with CacheServer(folder, tmp_path / "blocks") as served:
        again = served.ask("again", [*TOKENS[: LAST_BEGIN + 2], *prompt(9, salt=8)])
    assert again.cache.cached_token_count == LAST_BEGIN, "also from SSD"


def checkpoints(served: SteppedServer) -> list[int]:
    nodes = (node for node in served.cache.tree if RegionKind.CHECKPOINT in node.ram)
    return sorted(node.end_token_index for node in nodes)


@pytest.mark.parametrize("facts", [HYBRID, STATE_ONLY])
def test_the_budget_of_a_session_holds(facts: CacheFacts) -> None:
    with SteppedServer(facts=facts, session_checkpoint_limit=4, checkpoint_interval_tokens=1 << 20) as served:
        tokens = stepped_prompt(200)
        for turn in range(6):
            borders = (70, 100 + 70 * turn)
            answer = served.ask("turn", tokens, max_output_tokens=2, session_id="s", borders=borders)
            assert len(checkpoints(served)) <= 4
            tokens = [*tokens, *answer.tokens, *stepped_prompt(70, salt=turn)]
            served.check()


@pytest.mark.parametrize("border", [70, 72], ids=["inside a block", "at a block's end"])
def test_a_border_is_kept_wherever_it_is_unless_what_is_there_serves_as_well(border: int) -> None:
    with SteppedServer(facts=HYBRID, checkpoint_interval_tokens=1 << 20) as served:
        tokens = stepped_prompt(40 * BLOCK + 2)
        served.ask("first", tokens, max_output_tokens=0, borders=(8, 63, border, len(tokens) - 1))
        assert checkpoints(served) == [border, 40 * BLOCK, len(tokens) - 1]
        near = [*tokens, *stepped_prompt(200, salt=2)]
        served.ask("next", near, max_output_tokens=0, borders=(border, len(tokens) + 40, len(tokens) + 90))
        assert checkpoints(served)[3:] == [len(tokens) + 90, len(near) // BLOCK * BLOCK, len(near) - 1]
        served.check()


def test_other_models_stop_nowhere() -> None:
    with SteppedServer(facts=KV) as served:
        served.ask("first", stepped_prompt(200), max_output_tokens=1, borders=(70,))
        assert not any(node.end_token_index == 70 for node in served.cache.tree)
