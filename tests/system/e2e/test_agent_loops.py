"""An agent's loop of five tool turns through the Python client, with scripted models of six families."""

from __future__ import annotations

from pathlib import Path

import pytest
from icehouse_client import Client, Conversation, Tool

from tests.fixtures.chat.agent_loop import FAMILIES, QUESTION, SYSTEM, TOOLS
from tests.fixtures.chat.scripted_replies import scripted
from tests.system.crash.crashing_server import ServerProcess

LEAST_REUSED = 0.9
OPTIONS = ("--block-token-count", "16", "--min-prefix-token-count", "0", "--no-restore-or-recompute")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_is_the_right_one_and_every_later_prompt_is_reused(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.write(tmp_path / "model")
    tools = [Tool(tool["name"], tool["description"], tool["parameters"]) for tool in TOOLS]
    talk = Conversation(system=SYSTEM, tools=tools)
    talk.say(QUESTION)
    reused = []
    with ServerProcess(
        model=model,
        directory=tmp_path / "blocks",
        log=tmp_path / "log",
        options=OPTIONS,
        break_it=scripted(model, family.script),
    ) as server:
        server.wait_until_serving()
        with Client(server.address) as client:
            for turn in family.turns:
                reply = client.chat(talk, session_id=talk.session_id)
                talk.add(reply)
                assert tuple((call.name, call.arguments) for call in reply.tool_calls) == turn.calls
                assert not reply.malformed_tool_calls and reply.text.strip() == turn.said
                assert reply.reasoning.strip() == (turn.thought if family.thinks else "")
                reused.append(reply.usage.cached_tokens / reply.usage.prompt_tokens)
                for call, result in zip(reply.tool_calls, turn.results, strict=True):
                    talk.answer(call, result)
    assert reused[0] == 0 and min(reused[1:]) > LEAST_REUSED, reused
