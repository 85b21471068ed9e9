"""Agents as they are, five turns of tools and another question: each prompt begins as the one before.

They leave reasoning out, write arguments anew, name calls otherwise, send tools in any order and a billing
line that changes. The model's template drops the reasoning of turns before the last question. How much is
reused is counted of the earlier prompt and its reply: what is new in a turn was never computed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from clients.http.tests.fronts import HttpFront, front_of
from clients.http.tests.test_agents import server_of
from tests.fixtures.chat.agent_loop import FAMILIES, QUESTION, SYSTEM, TOOLS, AgentFamily, Turn
from tests.system.crash.crashing_server import ServerProcess

LEAST_REUSED = 0.95
RULES = SYSTEM[:800]


@dataclasses.dataclass(frozen=True)
class Answered:
    """What an agent reads of an answer."""

    said: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    prompt_token_count: int
    cached_token_count: int
    output_token_count: int


@dataclasses.dataclass
class Agent:
    """An agent's conversation, in no protocol's words: system, then turns of question, answer and results."""

    front: HttpFront
    name: str
    turns: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    request_count: int = 0

    @property
    def system(self) -> str:
        """Another billing line each time."""
        self.request_count += 1
        return f"x-billing-header: v=1; cch={self.request_count:05};\n{self.name} {RULES}"

    @property
    def tools(self) -> list[dict[str, Any]]:
        return random.Random(self.request_count).sample(TOOLS, len(TOOLS))

    def call_id(self, turn: int, index: int) -> str:
        return f"own_{turn}_{index}"


Ask = Callable[[Agent], Awaitable[Answered]]


def anew(arguments: dict[str, Any]) -> str:
    """Return arguments as no model and no template writes them."""
    return json.dumps(arguments, indent=2, sort_keys=True)


async def chat(agent: Agent) -> Answered:
    messages: list[dict[str, Any]] = [{"role": "system", "content": agent.system}]
    for number, (kind, content) in enumerate(agent.turns):
        if kind == "user":
            messages.append({"role": "user", "content": content})
        elif kind == "said":
            made = [
                {
                    "id": agent.call_id(number, index),
                    "type": "function",
                    "function": {"name": name, "arguments": anew(arguments)},
                }
                for index, (name, arguments) in enumerate(content.calls)
            ]
            said: dict[str, Any] = {"role": "assistant", "content": content.said or None}
            messages.append(said | ({"tool_calls": made} if made else {}))
        else:
            messages += [
                {"role": "tool", "tool_call_id": agent.call_id(number - 1, index), "content": result}
                for index, result in enumerate(content)
            ]
    tools: Any = [{"type": "function", "function": tool} for tool in agent.tools]
    answer = await agent.front.openai.chat.completions.create(model="m", messages=messages, tools=tools)  # type: ignore[call-overload]
    message, usage = answer.choices[0].message, answer.usage
    calls = tuple((c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or [])
    details = usage.prompt_tokens_details
    return Answered(
        (message.content or "").strip(),
        calls,
        usage.prompt_tokens,
        details.cached_tokens,
        usage.completion_tokens,
    )


async def messages(agent: Agent) -> Answered:
    turns: list[dict[str, Any]] = []
    for number, (kind, content) in enumerate(agent.turns):
        blocks: list[dict[str, Any]] = []
        if kind == "user":
            blocks.append({"type": "text", "text": content})
        elif kind == "said":
            if content.said:
                blocks.append({"type": "text", "text": content.said})
            blocks += [
                {"type": "tool_use", "id": agent.call_id(number, index), "name": name, "input": arguments}
                for index, (name, arguments) in enumerate(content.calls)
            ]
        else:
            blocks += [
                {"type": "tool_result", "tool_use_id": agent.call_id(number - 1, index), "content": result}
                for index, result in enumerate(content)
            ]
        turns.append({"role": "assistant" if kind == "said" else "user", "content": blocks})
    tools: Any = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in agent.tools
    ]
    asked: Any = {"max_tokens": 4000, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    answer = await agent.front.anthropic.messages.create(
        model="m", system=agent.system, messages=turns, tools=tools, **asked
    )
    said = "".join(block.text for block in answer.content if block.type == "text")
    calls = tuple((block.name, block.input) for block in answer.content if block.type == "tool_use")
    usage = answer.usage
    cached = usage.cache_read_input_tokens
    whole = usage.input_tokens + cached + usage.cache_creation_input_tokens
    return Answered(said.strip(), calls, whole, cached, usage.output_tokens)


async def responses(agent: Agent) -> Answered:
    items: list[dict[str, Any]] = []
    for number, (kind, content) in enumerate(agent.turns):
        if kind == "user":
            items.append({"role": "user", "content": content})
        elif kind == "said":
            if content.said:
                part = {"type": "output_text", "text": content.said}
                items.append({"type": "message", "role": "assistant", "content": [part]})
            items += [
                {
                    "type": "function_call",
                    "call_id": agent.call_id(number, index),
                    "name": name,
                    "arguments": anew(arguments),
                }
                for index, (name, arguments) in enumerate(content.calls)
            ]
        else:
            items += [
                {
                    "type": "function_call_output",
                    "call_id": agent.call_id(number - 1, index),
                    "output": result,
                }
                for index, result in enumerate(content)
            ]
    tools: Any = [{"type": "function", **tool} for tool in agent.tools]
    given: Any = items
    answer = await agent.front.openai.responses.create(
        model="m", instructions=agent.system, input=given, tools=tools, store=False
    )
    calls = tuple(
        (item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"
    )
    usage = answer.usage
    assert usage is not None
    cached = usage.input_tokens_details.cached_tokens
    return Answered(answer.output_text.strip(), calls, usage.input_tokens, cached, usage.output_tokens)


async def reused(front: HttpFront, ask: Ask, turns: tuple[Turn, ...], *, name: str) -> list[float]:
    """Lead the conversation; return how much of each earlier prompt and its reply was reused in the next.

    Where a turn has no results, the question is asked once more.
    """
    agent = Agent(front, name)
    shares: list[float] = []
    known_count = 0
    for turn in turns:
        if not agent.turns or agent.turns[-1][0] == "said":
            agent.turns.append(("user", QUESTION))
        answer = await ask(agent)
        assert (answer.said, answer.calls) == (turn.said, turn.calls)
        if known_count:
            shares.append(answer.cached_token_count / known_count)
        known_count = answer.prompt_token_count + answer.output_token_count
        agent.turns.append(("said", answer))
        if turn.results:
            agent.turns.append(("results", turn.results))
    return shares


@pytest.fixture(scope="module", params=["hermes", "harmony"])
def family(request: pytest.FixtureRequest) -> AgentFamily:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def server(family: AgentFamily, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_of(family, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.mark.parametrize("ask", [chat, messages, responses], ids=["chat", "messages", "responses"])
async def test_each_prompt_begins_with_the_one_before_and_its_reply(
    family: AgentFamily, server: ServerProcess, ask: Ask
) -> None:
    async with front_of(server.address) as front:
        shares = await reused(front, ask, (*family.turns, *family.turns[:2]), name=f"Stable. {ask.__name__}.")
        assert len(shares) >= 7 and min(shares) >= LEAST_REUSED, shares


async def test_exact_prompts_lose_what_the_template_rewrites(
    family: AgentFamily, server: ServerProcess
) -> None:
    """So the test above can fail; the billing line alone ends every match."""
    async with front_of(server.address, exact_prompts=True) as front:
        shares = await reused(front, chat, family.turns[:3], name="Exact.")
        assert max(shares) < LEAST_REUSED, shares
