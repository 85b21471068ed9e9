"""Commands on pages: each names a command with options that exist, whether or not it is run."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest
import typer
from icehouse.v1 import usage_pb2
from icehouse_server import device
from icehouse_server.bootstrap import machine
from icehouse_server.cli.main import app

from docs import capacity
from tests.fixtures.pages import blocks_of
from tests.tidy.tree import ROOT, text_files

PAGES = [
    ROOT / path for path, _ in text_files() if path.suffix == ".md" and path.parts[0] in ("docs", "README.md")
]
COMMAND: Any = typer.main.get_command(app)


def shown() -> list[tuple[str, list[str]]]:
    """Return every `icehouse` command in blocks of shell, with where it stands."""
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            for line in block.commands if block.language == "sh" else ():
                for part in line.split(" | "):
                    words = shlex.split(part, comments=True)
                    if words and words[0].rpartition("/")[2] == "icehouse":
                        end = next((i for i, word in enumerate(words) if word in "<>;&"), len(words))
                        found.append((f"{page.relative_to(ROOT)}:{block.line}", words[1:end]))
    return found


@pytest.mark.parametrize(("place", "words"), shown(), ids=lambda value: " ".join(value)[:60])
def test_a_command_on_a_page_exists(place: str, words: list[str]) -> None:
    command, context = COMMAND, click.Context(COMMAND, info_name="icehouse")
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"{place}: there is no such command: {words}"
        command, words = command.commands[words[0]], words[1:]
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    told = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert told <= options, f"{place}: {context.info_name} {command.name} has no {told - options}"


def test_every_block_that_is_not_run_says_why() -> None:
    marked = [
        b for page in PAGES for b in blocks_of(page) if b.language == "python" and b.mark and not b.is_run
    ]
    assert all(
        b.mark in ("run: agents", "run: gateway", "run: http", "run: vision")
        or b.mark.startswith("not run: ")
        for b in marked
    )


def test_the_page_on_prefill_has_every_reason() -> None:
    page = (ROOT / "docs/prefill.md").read_text(encoding="utf-8")
    told = {line[3:] for line in page.splitlines() if line.startswith("## REUSE_LIMIT_")}
    assert told == set(usage_pb2.ReuseLimit.keys()) - {"REUSE_LIMIT_UNSPECIFIED"}


def test_the_sizes_of_macs_are_of_the_servers_own_shares() -> None:
    assert capacity._LIMIT_SHARE == device.USABLE_SHARE
    assert capacity._RAM_TIER_SHARE == machine._CACHE_SHARE_GPU
