"""The demo model with sliding windows, real: a prompt longer than a window, from each tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_client import Reply
from icehouse_server.cli.local.child_server import serving
from icehouse_server.cli.local.demo import STORY_OPTIONS, long_prompt
from icehouse_server.demo.models import GEMMA

from tests.fixtures.demo_models import demo_model_dir

_WINDOW_TOKEN_COUNT = 512


def passes_of_a_server(scratch: Path, count: int) -> list[Reply]:
    """Start a server, send the same prompt so often, stop it."""
    with serving("starting a server", scratch=scratch, model=GEMMA.name) as (client, _):
        return [client.generate(long_prompt(), **STORY_OPTIONS) for _ in range(count)]


@pytest.mark.slow
def test_a_window_that_has_moved_comes_back_from_each_tier(tmp_path: Path) -> None:
    demo_model_dir(GEMMA)
    cold, from_ram = passes_of_a_server(tmp_path, 2)
    (from_ssd,) = passes_of_a_server(tmp_path, 1)
    token_count = cold.usage.prompt_tokens
    assert token_count > _WINDOW_TOKEN_COUNT and cold.usage.ram_tokens == 0
    assert from_ram.usage.ram_tokens == token_count - 1
    assert from_ssd.usage.ssd_tokens == token_count - 1
    assert "keep it still" in cold.text
    assert cold.text == from_ram.text == from_ssd.text
