"""The demo model with sliding windows, real: a prompt longer than a window, from each tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_server.cli.demo import free_port, long_prompt, running_server
from icehouse_server.demo.models import GEMMA
from icehouse_server.rpc.client.generate import Connection, Prompt, Summary

from tests.fixtures.demo_models import demo_model_dir

_WINDOW_TOKEN_COUNT = 512


def passes_of_a_server(scratch: Path, count: int) -> list[tuple[str, Summary]]:
    """Start a server, send the same prompt so often, stop it."""
    address = f"127.0.0.1:{free_port()}"
    prompt = Prompt(text=long_prompt(), max_output_tokens=16, temperature=0.0, stop=("\n",))
    found = []
    with (
        running_server(address=address, scratch=scratch, model=GEMMA.name) as server,
        Connection(address) as connection,
    ):
        assert connection.wait_until_serving(is_alive=lambda: server.poll() is None), "the server ended"
        for _ in range(count):
            pieces: list[str] = []
            summary = connection.stream(prompt, on_text=pieces.append, timeout_s=300)
            found.append(("".join(pieces), summary))
    return found


@pytest.mark.timeout(400)
def test_a_window_that_has_moved_comes_back_from_each_tier(tmp_path: Path) -> None:
    demo_model_dir(GEMMA)
    cold, from_ram = passes_of_a_server(tmp_path, 2)
    (from_ssd,) = passes_of_a_server(tmp_path, 1)
    token_count = cold[1].prompt_token_count
    assert token_count > _WINDOW_TOKEN_COUNT and cold[1].ram_token_count == 0
    assert from_ram[1].ram_token_count == token_count - 1
    assert from_ssd[1].ssd_token_count == token_count - 1
    assert "keep it still" in cold[0]
    assert cold[0] == from_ram[0] == from_ssd[0]
