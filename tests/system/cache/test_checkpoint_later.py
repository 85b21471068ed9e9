"""A block that went to SSD before a checkpoint was taken at its end gains it there."""

from __future__ import annotations

from pathlib import Path

from tests.system.cache.stepped_server import BLOCK, HYBRID, SteppedServer, prompt


def _ask(directory: Path, token_count: int) -> int:
    """Ask one process for a prompt and stop it; return how much of it came from SSD."""
    with SteppedServer(directory, facts=HYBRID, checkpoint_interval_tokens=1000) as served:
        return served.ask("prompt", prompt(token_count), max_output_tokens=1).cache.ssd_token_count


def test_what_a_shorter_prompt_adds_is_there_after_a_restart(tmp_path: Path) -> None:
    # Computed through: its checkpoint is at its last full block.
    assert _ask(tmp_path, 6 * BLOCK + 1) == 0
    # The same beginning: its blocks are known, and no state to go on from.
    assert _ask(tmp_path, 2 * BLOCK + 1) == 0
    assert _ask(tmp_path, 2 * BLOCK + 1) == 2 * BLOCK
    assert _ask(tmp_path, 6 * BLOCK + 1) == 6 * BLOCK
