"""Programs for coding, set as docs/howto/agent-programs.md shows: each mends a file and reuses prompts."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.system.agents.conftest import QUESTION, RIGHT, Desk, Prompt, desk_of
from tests.system.agents.programs import Program
from tests.system.agents.scripted_model import Call, Step

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]

LEAST_REUSED = 0.95
DONE = "The greeting is mended."
MCP_SERVER = str(Path(__file__).with_name("mcp_server.py"))
AGAIN = Step("Is it right now?", thought="I have just mended it.", said="It is.")
Installed = Callable[[str], Program]


def settings(desk: Desk, section: str, language: str) -> str:
    """Return the only settings in a language that the page shows for a program."""
    [block] = [block for block in desk.shown(section) if block.language == language]
    return block.text


def documents(output: str) -> list[dict[str, Any]]:
    """Return the JSON that a program printed, a document a line."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def check(desk: Desk, *, least_reused: float = LEAST_REUSED) -> list[Prompt]:
    """The file is mended in three turns, each with all of the last prompt cached; return all prompts."""
    assert desk.file.read_text(encoding="utf-8") == RIGHT
    prompts = desk.prompts(least_tokens=2000)
    for before, prompt in itertools.pairwise(prompts[:3]):
        assert prompt.cached_count >= before.token_count and prompt.reused >= least_reused, prompts
    return prompts


def check_next_question(prompts: Sequence[Prompt]) -> None:
    """A question after the task, of a process of its own, goes on with the conversation.

    The model's template drops the reasoning behind the last question, so what is sure is what was before it.
    """
    *_, last = prompts
    assert len(prompts) == 4 and last.reused >= LEAST_REUSED, prompts
    assert last.cached_count >= prompts[0].token_count, prompts
    assert len({prompt.session_id for prompt in prompts}) == 1


def codex_steps(file: Path) -> Sequence[Step]:
    mend = "sed -i s/helo/hello/ greet.py && echo mended-$((40 + 2))"
    return (
        Step(QUESTION, thought="I look first.", calls=[Call("exec_command", {"cmd": "cat greet.py"})]),
        Step("print('helo", thought="A letter is missing.", calls=[Call("exec_command", {"cmd": mend})]),
        Step("mended-42", thought="That was it.", said=DONE),
        AGAIN,
    )


def configure_codex(codex: Program, desk: Desk, more: str = "") -> None:
    """Write its settings. A sandbox of its own cannot be made in every container."""
    folder = codex.home / ".codex"
    folder.mkdir()
    written = f'sandbox_mode = "danger-full-access"\n{settings(desk, "Codex CLI", "toml")}\n{more}'
    (folder / "config.toml").write_text(written, encoding="utf-8")


async def test_codex(tmp_path: Path, installed: Installed) -> None:
    codex = installed("codex")
    async with desk_of(tmp_path, codex_steps) as desk:
        configure_codex(codex, desk)
        told = documents(await desk.run(codex, "Codex CLI"))
        check_next_question(check(desk))
    said = [item["item"] for item in told if item["type"] == "item.completed"]
    assert [item["text"] for item in said if item["type"] == "agent_message"] == [f"\n\n{DONE}", "\n\nIt is."]
    first, *_ = [event["usage"] for event in told if event["type"] == "turn.completed"]
    assert first["cached_input_tokens"] > LEAST_REUSED * first["input_tokens"] * 2 / 3


def melting_steps(file: Path) -> Sequence[Step]:
    melt = Call("mcp__ice__melt", {"grams": 7})
    return Step(QUESTION, calls=[melt]), Step("melted 7 grams", said="It is water."), AGAIN


async def test_codex_calls_a_tool_of_an_mcp_server(tmp_path: Path, installed: Installed) -> None:
    codex = installed("codex")
    server = f"[mcp_servers.ice]\ncommand = {json.dumps(sys.executable)}\nargs = [{json.dumps(MCP_SERVER)}]\n"
    async with desk_of(tmp_path, melting_steps) as desk:
        configure_codex(codex, desk, server)
        told = documents(await desk.run(codex, "Codex CLI"))
        first, second, _ = desk.prompts()
    items = [event["item"] for event in told if event["type"] == "item.completed"]
    [called] = [item for item in items if item["type"] == "mcp_tool_call"]
    assert (called["server"], called["tool"], called["status"]) == ("ice", "melt", "completed"), called
    assert "It is water." in [item.get("text", "").strip() for item in items]
    assert second.cached_count >= first.token_count


def opencode_steps(file: Path) -> Sequence[Step]:
    edit = {"filePath": str(file), "oldString": "helo", "newString": "hello"}
    return (
        Step("title", said="A greeting"),
        Step(QUESTION, thought="I look first.", calls=[Call("read", {"filePath": str(file)})]),
        Step("print('helo", thought="A letter is missing.", calls=[Call("edit", edit)]),
        Step("Edit applied", thought="That was it.", said=DONE),
        AGAIN,
    )


async def test_opencode(tmp_path: Path, installed: Installed) -> None:
    opencode = installed("opencode")
    async with desk_of(tmp_path, opencode_steps) as desk:
        written = settings(desk, "OpenCode", "json")
        (desk.folder / "opencode.json").write_text(written, encoding="utf-8")
        quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
        told = documents(await desk.run(opencode, "OpenCode", **quiet))
        check_next_question(check(desk))
    texts = [event["part"]["text"] for event in told if event["type"] == "text"]
    assert [text.strip() for text in texts] == [DONE, AGAIN.said]
    costs = [event["part"]["tokens"] for event in told if event["type"] == "step_finish"]
    assert costs[0]["cache"]["read"] == 0 and len(costs) == 4
    assert all(cost["cache"]["read"] > 20 * cost["input"] for cost in costs[1:]), costs


def claude_steps(file: Path) -> Sequence[Step]:
    edit = {"file_path": str(file), "old_string": "helo", "new_string": "hello"}
    return (
        Step(QUESTION, thought="I look first.", calls=[Call("Read", {"file_path": str(file)})]),
        Step("print('helo", thought="A letter is missing.", calls=[Call("Edit", edit)]),
        Step("has been updated", thought="That was it.", said=DONE),
        AGAIN,
    )


async def test_claude_code(tmp_path: Path, installed: Installed) -> None:
    claude = installed("claude")
    async with desk_of(tmp_path, claude_steps) as desk:
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
        told, later = documents(await desk.run(claude, "Claude Code", **quiet))
        check_next_question(check(desk))
    assert (told["is_error"], told["result"].strip(), told["num_turns"]) == (False, DONE, 3)
    assert later["result"].strip() == AGAIN.said
    usage = told["usage"]
    whole = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert usage["cache_read_input_tokens"] > LEAST_REUSED * whole * 2 / 3


def searching_steps(file: Path) -> Sequence[Step]:
    query = {"query": "select:WebFetch,NotebookEdit", "max_results": 2}
    first, *later = claude_steps(file)
    search = Step(QUESTION, thought="I may need more tools.", calls=[Call("ToolSearch", query)])
    return search, Step("The tool WebFetch can be called now.", calls=first.calls), *later


async def test_claude_code_searches_for_tools(tmp_path: Path, installed: Installed) -> None:
    """What it finds joins the tools. Instructions and the tools before them are not computed again."""
    claude = installed("claude")
    async with desk_of(tmp_path, searching_steps) as desk:
        told, _ = documents(await desk.run(claude, "Claude Code"))
        assert (told["is_error"], told["result"].strip(), told["num_turns"]) == (False, DONE, 4)
        prompts = desk.prompts()
    assert len(prompts) == 5, "nothing was refused and asked again"
    assert prompts[1].token_count > prompts[0].token_count + 500, "two tools are there that were not"
    assert prompts[1].cached_count > prompts[0].token_count / 4
    assert min(prompt.reused for prompt in prompts[2:4]) >= LEAST_REUSED


def cn_steps(file: Path) -> Sequence[Step]:
    edit = {"file_path": str(file), "old_string": "helo", "new_string": "hello"}
    return (
        Step(QUESTION, thought="I look first.", calls=[Call("Read", {"filepath": str(file)})]),
        Step("print('helo", thought="A letter is missing.", calls=[Call("Edit", edit)]),
        Step("print('hello", thought="That was it.", said=DONE),
    )


async def test_continue(tmp_path: Path, installed: Installed) -> None:
    continued = installed("cn")
    async with desk_of(tmp_path, cn_steps) as desk:
        written = settings(desk, "Continue", "yaml")
        (desk.folder / "config.yaml").write_text(written, encoding="utf-8")
        told = await desk.run(continued, "Continue", CONTINUE_TELEMETRY_ENABLED="0")
        # Its prompts are short beside what a tool answers.
        assert len(check(desk, least_reused=0.8)) == 3
    assert told.strip() == DONE


MARKS = ("<" * 7, "=" * 7, ">" * 7)
BLOCK = "greet.py\n```\n{} SEARCH\nprint('helo')\n{}\nprint('hello')\n{} REPLACE\n```\n".format(*MARKS)
"""How aider has a model write a change."""


def aider_steps(file: Path) -> Sequence[Step]:
    return (
        Step(QUESTION, thought="A letter is missing.", said=BLOCK),
        Step("Is it right now?", thought="It is.", said=DONE),
    )


async def test_aider(tmp_path: Path, installed: Installed) -> None:
    """Its instructions and examples are reused; the file that it shows behind them is another one then."""
    aider = installed("aider")
    async with desk_of(tmp_path, aider_steps) as desk:
        written = settings(desk, "aider", "yaml")
        (desk.folder / ".aider.conf.yml").write_text(written, encoding="utf-8")
        off = ("GIT", "CHECK_UPDATE", "SHOW_MODEL_WARNINGS", "SHOW_RELEASE_NOTES")
        quiet = {f"AIDER_{name}": "false" for name in off} | {"AIDER_ANALYTICS_DISABLE": "true"}
        told = await desk.run(aider, "aider", **quiet, LITELLM_LOCAL_MODEL_COST_MAP="True")
        assert desk.file.read_text(encoding="utf-8") == RIGHT and DONE in told
        first, second = desk.prompts()
    assert first.cached_count == 0 and second.reused > 0.6
