"""A server whose model is scripted, the HTTP front before it, and the folder that a program works in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from clients.http.tests.fronts import front_of
from tests.fixtures.chat.scripted_replies import scripted
from tests.fixtures.pages import Block, blocks_of
from tests.system.agents.programs import Program, Unavailable, program
from tests.system.agents.scripted_model import Step, write_scripted_model
from tests.system.crash.crashing_server import ServerProcess
from tests.tidy.tree import ROOT

PAGE = ROOT / "docs" / "howto" / "agent-programs.md"
SHOWN_URL = "http://127.0.0.1:8000"
QUESTION = "Mend the greeting in greet.py."
"""What the page asks every program to do."""
WRONG, RIGHT = "print('helo')\n", "print('hello')\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One answered request: the tokens of its prompt, and how many of these came from the cache."""

    token_count: int
    cached_count: int
    session_id: str

    @property
    def reused(self) -> float:
        """The part that came from the cache."""
        return self.cached_count / self.token_count


@dataclasses.dataclass(frozen=True, slots=True)
class Desk:
    """Where a program works, and the front that it calls."""

    folder: Path
    url: str
    log: Path
    """The server's."""

    @property
    def file(self) -> Path:
        """What is to be mended."""
        return self.folder / "greet.py"

    def shown(self, section: str) -> list[Block]:
        """Return what the page shows of a program, with this front's address."""
        begin, end = _lines_of(section)
        blocks = [block for block in blocks_of(PAGE) if begin < block.line < end]
        assert any(SHOWN_URL in block.text for block in blocks), f"{section} shows no address"
        return [dataclasses.replace(block, text=block.text.replace(SHOWN_URL, self.url)) for block in blocks]

    async def run(self, tool: Program, section: str, **variables: str) -> str:
        """Run the section's commands beside its settings, as the page has them; return what they print."""
        commands = [block.text for block in self.shown(section) if block.language == "sh"]
        return await self.run_commands(tool, "".join(commands), **variables)

    async def run_commands(self, tool: Program, commands: str, **variables: str) -> str:
        """Run commands of a shell that finds the program; return what they print."""
        return await asyncio.to_thread(tool.run, commands, folder=self.folder, variables=variables)

    def prompts(self, *, least_tokens: int = 1) -> list[Prompt]:
        """Return the answered requests in order; `least_tokens` leaves out small ones, such as for titles."""
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
        return [
            Prompt(line["prompt_tokens"], line["cached_tokens"], line.get("session_id", ""))
            for line in lines
            if line["message"] == "call_ended"
            and "cached_tokens" in line
            and line["prompt_tokens"] >= least_tokens
        ]


def _lines_of(section: str) -> tuple[int, int]:
    """Return the lines between which a section of the page lies."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"## {section}") + 1
    later = (number for number, line in enumerate(lines, 1) if number > begin and re.match("## ", line))
    return begin, next(later, len(lines) + 1)


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], Program]:
    """Return a program by its name in programs.toml; skips the test where it cannot be had."""

    def get(name: str) -> Program:
        try:
            return program(name, tmp_path / "home")
        except Unavailable as lacking:
            pytest.skip(f"{name} cannot be had: {lacking}")

    return get


@contextlib.asynccontextmanager
async def desk_of(
    folder: Path, steps: Callable[[Path], Sequence[Step]], *options: str
) -> AsyncIterator[Desk]:
    """Serve a model that follows the steps for this file.

    Without `options` the settings are the server's own, but for the choice between reading and computing: a
    model as small as this would mostly compute.
    """
    model, log, work = write_scripted_model(folder / "model"), folder / "log", folder / "work"
    work.mkdir()
    (work / "greet.py").write_text(WRONG, encoding="utf-8")
    script = tuple((step.phrase, step.reply) for step in steps(work / "greet.py"))
    with ServerProcess(
        model=model,
        directory=folder / "blocks",
        log=log,
        options=("--no-restore-or-recompute", "--log-format", "json", *options),
        break_it=scripted(model, script),
    ) as server:
        await asyncio.to_thread(server.wait_until_serving)
        async with front_of(server.address) as front:
            yield Desk(work, front.url, log)
