"""Marks of the pages' shell blocks: each has one, and what CI is said to run it does run."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from tests.fixtures.pages import Block
from tests.fixtures.pages.marks import (
    BY_HAND,
    MARKS,
    all_shell_blocks,
    fault_of,
    lacking,
    shell_blocks,
)
from tests.fixtures.pages.servers import models_named, shells_of, starts_a_server
from tests.tidy.tree import ROOT

CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
SHELLS_OF_SERVERS = ("run: serve", "run: gateway")


def words_of(line: str) -> list[str]:
    """Return a command's words as a page and `.ci/run` have them alike: the program without its folder, and
    what `ARGS` of make says as words of its own."""
    words = shlex.split(line, comments=True)
    opened = [
        part
        for word in words
        for part in (shlex.split(word.removeprefix("ARGS=")) if word.startswith("ARGS=") else [word])
    ]
    return [words[0].rpartition("/")[2], *opened[1:]] if words else []


def is_run_by_ci(line: str) -> bool:
    """Whether `.ci/run` has a command of the same program and target or module, with all options of this one.
    Their values, such as where a release is written to, may be others."""
    shown = words_of(line)
    length = 3 if shown[1] == "-m" else 2
    for other in CI.replace("\\\n", " ").splitlines():
        try:
            there = words_of(other)
        except ValueError:
            # Half of a string that goes on.
            continue
        options = {word for word in shown[length:] if word.startswith("--")}
        if there[:length] == shown[:length] and options <= set(there):
            return True
    return False


def test_every_shell_block_says_what_runs_it() -> None:
    assert [fault for block in all_shell_blocks() if (fault := fault_of(block))] == []


def test_no_mark_and_no_reason_is_left_over() -> None:
    blocks = list(all_shell_blocks())
    assert {block.mark for block in blocks if not lacking(block)} == set(MARKS)
    assert {lacking(block) for block in blocks if lacking(block)} == set(BY_HAND)


@pytest.mark.parametrize("mark", ["", "runs", "run: somewhere", "by hand", "by hand: no time"])
def test_a_block_without_a_mark_or_with_an_unknown_one_is_noticed(mark: str) -> None:
    block = next(iter(all_shell_blocks()))
    assert fault_of(dataclasses.replace(block, mark=mark))


@pytest.mark.parametrize("block", shell_blocks("run: ci"), ids=lambda b: f"{b.page.name}:{b.line}")
def test_what_ci_is_said_to_run_it_runs(block: Block) -> None:
    assert [line for line in block.commands if not is_run_by_ci(line)] == []


def test_what_ci_does_not_run_is_noticed() -> None:
    assert is_run_by_ci("make test    # the suite") and is_run_by_ci(
        ".venv/bin/python -m release.checksums x"
    )
    for line in ("make fleet", 'make release ARGS="--sign"', "python -m release.version", "tee x"):
        assert not is_run_by_ci(line), line


def test_each_server_has_a_shell_with_the_lines_before_it() -> None:
    lines = [
        "cd a",
        ".venv/bin/icehouse serve org/b --port 1",
        "make serve    # c",
        "icehouse serve --model ~/d",
    ]
    assert shells_of(lines) == [lines[:2], lines[2:3], lines[3:]]
    assert [models_named(line) for line in lines[1:]] == ["org/b", "demo", "~/d"]


def test_servers_and_calls_by_hand_are_in_blocks_that_know_them() -> None:
    for block in all_shell_blocks():
        place = f"{block.page.name}:{block.line}"
        starts = any(starts_a_server(line) for line in block.commands)
        assert starts <= (block.mark in SHELLS_OF_SERVERS), f"{place}: nobody would stop this server"
        is_called = any(re.match("grpcurl ", line) for line in block.commands)
        assert is_called <= (block.mark in ("run: grpcurl", "run: vision")), place
        assert block.mark != "run: grpcurl" or all(line.startswith("grpcurl ") for line in block.commands)
