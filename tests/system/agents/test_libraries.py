"""Libraries that agents are made of: their programs of docs/howto/agent-programs.md, as the page has them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.agents.conftest import WRONG, Desk, desk_of
from tests.system.agents.programs import Program
from tests.system.agents.scripted_model import Call, Step

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]

SMALL = ("--block-token-count", "16", "--min-prefix-token-count", "0")
"""The prompts here are shorter than a block."""


async def output_of(desk: Desk, tool: Program, section: str) -> list[tuple[str, int]]:
    """Run the page's Python; return each line's text and how many tokens it says were cached."""
    [block] = [block for block in desk.shown(section) if block.language == "python"]
    told = await desk.run_commands(tool, f"python -W error::UserWarning -c {shlex.quote(block.text)}")
    return [(text, int(count)) for text, count in re.findall(r"^(.*) (\d+) were cached$", told, re.M)]


def steam_steps(file: Path) -> tuple[Step, ...]:
    return Step("What is ice?", said="Frozen water."), Step("And steam?", said="Hot water.")


async def test_litellm(tmp_path: Path, installed: Callable[[str], Program]) -> None:
    async with desk_of(tmp_path, steam_steps, *SMALL) as desk:
        told = await output_of(desk, installed("litellm"), "LiteLLM")
        prompts = desk.prompts()
    assert [text for text, _ in told] == ["Frozen water.", "Hot water."]
    assert [count for _, count in told] == [prompt.cached_count for prompt in prompts]
    assert told[0][1] == 0 < told[1][1]


def reading_steps(file: Path) -> tuple[Step, ...]:
    return (
        Step("What does greet.py print?", calls=[Call("read_file", {"path": str(file)})]),
        Step(WRONG, said="It prints helo."),
    )


async def test_langchain(tmp_path: Path, installed: Callable[[str], Program]) -> None:
    """Each of the three protocols: the call, its result, and what the second turn reused."""
    async with desk_of(tmp_path, reading_steps, *SMALL) as desk:
        told = await output_of(desk, installed("langchain"), "LangChain")
        prompts = desk.prompts()
    assert [text for text, _ in told] == ["It prints helo."] * 3
    assert [count for _, count in told] == [prompt.cached_count for prompt in prompts[1::2]]
    assert all(prompt.reused > 0.5 for prompt in prompts[1::2])
