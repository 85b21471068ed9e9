"""An agent's loop of five tool turns with each SDK, before a server whose model is scripted."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from clients.http.tests.fronts import HttpFront, front_of
from tests.fixtures.chat.agent_loop import FAMILIES, QUESTION, SYSTEM, TOOLS, AgentFamily
from tests.fixtures.chat.scripted_replies import scripted
from tests.system.crash.crashing_server import ServerProcess

FAMILY = FAMILIES["hermes"]
LEAST_REUSED = 0.9
OPTIONS = ("--block-token-count", "16", "--min-prefix-token-count", "0", "--no-restore-or-recompute")
FUNCTIONS: Any = [{"type": "function", "function": tool} for tool in TOOLS]


@contextlib.contextmanager
def server_of(family: AgentFamily, folder: Path) -> Iterator[ServerProcess]:
    model = family.write(folder / "model")
    with ServerProcess(
        model=model,
        directory=folder / "blocks",
        log=folder / "log",
        options=OPTIONS,
        break_it=scripted(model, family.script),
    ) as started:
        started.wait_until_serving()
        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_of(FAMILY, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
async def front(server: ServerProcess) -> AsyncIterator[HttpFront]:
    async with front_of(server.address) as started:
        yield started


@pytest.fixture
def system(request: pytest.FixtureRequest) -> str:
    """The rules, which begin otherwise in each test: none finds what another one left in the cache."""
    return f"{zlib.crc32(request.node.name.encode()):08x} {SYSTEM}"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model writes calls in tags, which no grammar can hold it to."""
    with server_of(FAMILIES["qwen-tags"], tmp_path_factory.mktemp("tagged")) as started:
        yield started


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_chat(front: HttpFront, system: str, is_streamed: bool) -> None:
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    reused = []
    for turn in FAMILY.turns:
        asked = {"model": "m", "messages": messages, "tools": FUNCTIONS}
        answer = await (_summed(front, asked) if is_streamed else _chat(front, asked))
        said, usage = answer
        calls = said.get("tool_calls", [])
        told = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        assert told == list(turn.calls) and (said["content"] or "").strip() == turn.said
        assert said["reasoning_content"].strip() == turn.thought
        messages.append(said)
        reused.append(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens)
        for call, result in zip(calls, turn.results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    assert reused[0] == 0 and min(reused[1:]) > LEAST_REUSED, reused


async def _chat(front: HttpFront, asked: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    answer = await front.openai.chat.completions.create(**asked)
    [choice] = answer.choices
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    return choice.message.model_dump(exclude_none=True) | {"content": choice.message.content}, answer.usage


async def _summed(front: HttpFront, asked: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    said: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    usage = None
    asked["stream_options"] = {"include_usage": True}
    async for chunk in await front.openai.chat.completions.create(**asked, stream=True):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said["content"] += choice.delta.content or ""
            said["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(said["tool_calls"]), "each comes in one piece"
                said["tool_calls"].append(call.model_dump(exclude={"index"}))
    return said, usage


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_messages(front: HttpFront, system: str, is_streamed: bool) -> None:
    tools: Any = [
        {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
        for tool in TOOLS
    ]
    messages: Any = [{"role": "user", "content": QUESTION}]
    reused = []
    for turn in FAMILY.turns:
        asked: Any = {
            "model": "m",
            "max_tokens": 4000,
            "system": system,
            "messages": messages,
            "tools": tools,
            "thinking": {"type": "enabled", "budget_tokens": 2000},
        }
        if is_streamed:
            async with front.anthropic.messages.stream(**asked) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await front.anthropic.messages.create(**asked)
        by_type: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
        for block in answer.content:
            by_type[block.type].append(block)
        calls = by_type["tool_use"]
        assert [(call.name, call.input) for call in calls] == list(turn.calls)
        assert "".join(block.text for block in by_type["text"]).strip() == turn.said
        assert [block.thinking.strip() for block in by_type["thinking"]] == [turn.thought]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        usage = answer.usage
        whole = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        reused.append(usage.cache_read_input_tokens / whole)
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(calls, turn.results, strict=True)
        ]
        if results:
            messages.append({"role": "user", "content": results})
    assert reused[0] == 0 and min(reused[1:]) > LEAST_REUSED, reused


RESPONSE_TOOLS: Any = [{"type": "function", **tool} for tool in TOOLS]


async def _response(front: HttpFront, asked: dict[str, Any], *, is_streamed: bool) -> Any:
    if not is_streamed:
        return await front.openai.responses.create(**asked)
    async with front.openai.responses.stream(**asked) as stream:
        return await stream.get_final_response()


@pytest.mark.parametrize(
    ("is_streamed", "is_kept"), [(True, False), (False, True)], ids=["streamed, as Codex", "whole, kept"]
)
async def test_responses(front: HttpFront, system: str, is_streamed: bool, is_kept: bool) -> None:
    """With the conversation sent each time, as Codex does, and with the id of the last response."""
    items: Any = [{"role": "user", "content": QUESTION}]
    reused, previous = [], None
    for turn in FAMILY.turns:
        asked = {"model": "m", "instructions": system, "input": items, "tools": RESPONSE_TOOLS}
        asked |= {"store": is_kept, "include": ["reasoning.encrypted_content"]}
        asked |= {"previous_response_id": previous} if previous else {}
        answer = await _response(front, asked, is_streamed=is_streamed)
        assert answer.status == "completed" and answer.output_text.strip() == turn.said
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == list(turn.calls)
        [thought] = [item for item in answer.output if item.type == "reasoning"]
        assert thought.content[0].text.strip() == turn.thought
        reused.append(answer.usage.input_tokens_details.cached_tokens / answer.usage.input_tokens)
        # Codex sends reasoning back without its text.
        said = [item.model_dump(exclude={"status", "id"}, exclude_none=True) for item in answer.output]
        said[0].pop("content", None)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": result}
            for call, result in zip(calls, turn.results, strict=True)
        ]
        items, previous = (results, answer.id) if is_kept else ([*items, *said, *results], None)
    assert reused[0] == 0 and min(reused[1:]) > LEAST_REUSED, reused


async def test_strict_tools_need_not_be_where_nothing_can_hold_a_model_to_them(tagged: ServerProcess) -> None:
    """OpenAI's Agents SDK says it of each tool, whatever the model."""
    functions: Any = [{**each, "function": {**each["function"], "strict": True}} for each in FUNCTIONS]
    tools: Any = [{**each, "strict": True} for each in RESPONSE_TOOLS]
    turns: Any = [{"role": "user", "content": QUESTION}]
    async with front_of(tagged.address) as front:
        chat = await front.openai.chat.completions.create(model="m", messages=turns, tools=functions)
        answer = await front.openai.responses.create(model="m", input=QUESTION, tools=tools)
    assert [call.function.name for call in chat.choices[0].message.tool_calls or ()] == ["list_files"]
    assert [item.name for item in answer.output if item.type == "function_call"] == ["list_files"]


async def test_one_call_at_a_time_is_dropped_where_nothing_can_hold_a_model_to_it(
    tagged: ServerProcess,
) -> None:
    """Codex asks every model for it; where calls are no JSON the server refuses it of other callers."""
    asked: Any = {"model": "m", "instructions": SYSTEM, "input": QUESTION, "tools": RESPONSE_TOOLS}
    async with front_of(tagged.address) as front:
        answer = await front.openai.responses.create(**asked, parallel_tool_calls=False)
        with pytest.raises(openai.BadRequestError) as caught:
            await front.openai.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": QUESTION}],
                tools=FUNCTIONS,
                parallel_tool_calls=False,
            )
    assert [item.name for item in answer.output if item.type == "function_call"] == ["list_files"]
    assert (caught.value.code, caught.value.param) == ("TOOLS_UNSUPPORTED", "tool_choice")
