"""Chats with tools through the whole house: real tokenizer, engine, caches and wire."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import usage_pb2

from tests.fixtures.chat.chain_model import chain_model_dir
from tests.fixtures.models import tiny_model_dir
from tests.fixtures.models.chat_templates import ALTERNATING, THINKING, write_family
from tests.fixtures.models.vocabulary import VOCABULARY_SIZE
from tests.fixtures.whole_server import WholeServer, whole_server

TOOLS = [
    {
        "name": "get_weather",
        "parameters_json": '{"type": "object", "properties": {"city": {"type": "string"}}}',
    },
    {"name": "get_time"},
]
HEAD = '\n{"name": "get_weather", "arguments": '
CALLING = (
    "<think>",
    "wonder",
    "</think>",
    "Let me see. ",
    "<tool_call>",
    HEAD,
    '{"city": ',
    '"Oslo"}',
    "}\n",
    "</tool_call>",
)
"""What the model writes, in tokens; then it ends its turn."""


def asked(*, request_id: str = "", **fields: Any) -> messages.GenerateRequest:
    chat = {"messages": [{"role": "ROLE_USER", "content": "Is it raining in Oslo?"}]}
    prompt = {"chat": chat, "tools": fields.pop("tools", TOOLS)}
    whole = {"request_id": request_id, "prompt": prompt, "max_output_tokens": 24, **fields}
    return ParseDict(whole, messages.GenerateRequest())


async def heard(served: WholeServer, request: messages.GenerateRequest) -> list[messages.StreamResponse]:
    return [response async for response in served.inference.Stream(request)]


def summed(responses: list[messages.StreamResponse]) -> dict[str, Any]:
    """Return a stream's sum, made here and not by the server's own code."""
    deltas = [r.delta for r in responses if r.WhichOneof("event") == "delta"]
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.HasField("tool_call"):
            piece = delta.tool_call
            if piece.withdrawn:
                del calls[piece.index]
                continue
            call = calls.setdefault(piece.index, [piece.id, piece.name, ""])
            call[2] += piece.arguments_json
    return {
        "text": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        "calls": [tuple(call) for call in calls.values()],
        "malformed": [d.malformed_tool_call.text for d in deltas if d.HasField("malformed_tool_call")],
        "finish_reason": responses[-1].finished.finish_reason,
    }


def whole(response: messages.GenerateResponse) -> dict[str, Any]:
    return {
        "text": response.text,
        "reasoning": response.reasoning,
        "token_ids": list(response.token_ids),
        "calls": [(call.id, call.name, call.arguments_json) for call in response.tool_calls],
        "malformed": [malformed.text for malformed in response.malformed_tool_calls],
        "finish_reason": response.finish_reason,
    }


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calling")
    return chain_model_dir(folder, THINKING, [*CALLING, "<eos>"], first="Ċ")


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights under a template with tools and thoughts."""
    added = len(THINKING.tokens)
    folder = tiny_model_dir(tmp_path_factory.mktemp("babbling"), "llama", vocab_size=VOCABULARY_SIZE + added)
    return write_family(folder, THINKING)


async def test_a_call_is_streamed_name_first_and_generate_says_the_same(
    calling: Path, tmp_path: Path
) -> None:
    async with whole_server(calling, tmp_path, cache__block_token_count=16) as served:
        responses = await heard(served, asked(request_id="one"))
        answer = await served.inference.Generate(asked(request_id="one"))
        other = await served.inference.Generate(asked(request_id="two"))
    found = summed(responses)
    assert found == whole(answer)
    ((call_id, name, arguments),) = found["calls"]
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Oslo"})
    assert len(call_id) == 9 and call_id.isalnum() and call_id != other.tool_calls[0].id
    assert (found["reasoning"], found["text"]) == ("wonder", "Let me see. ")
    assert found["finish_reason"] == usage_pb2.FINISH_REASON_TOOL_CALLS and not found["malformed"]
    pieces = [r.delta.tool_call for r in responses if r.delta.HasField("tool_call")]
    assert pieces[0].name == "get_weather" and not pieces[0].arguments_json
    assert [piece.arguments_json for piece in pieces[1:]] == ['{"city": ', '"Oslo"}']
    kinds = [field.name for r in responses for field, _ in r.delta.ListFields() if field.name != "token_ids"]
    assert list(dict.fromkeys(kinds)) == ["reasoning", "text", "tool_call"]


async def test_special_markers_are_seen_where_they_are_needed_and_nowhere_else(tmp_path: Path) -> None:
    script = ["[TOOL_CALLS]", "get_weather", "[ARGS]", '{"city": ', '"Oslo"}', "<eos>"]
    folder = chain_model_dir(tmp_path / "model", ALTERNATING, script, first="[/INST]")
    async with whole_server(folder, tmp_path / "blocks", cache__block_token_count=16) as served:
        answer = await served.inference.Generate(asked())
        silent = await served.inference.Generate(asked(tool_choice={"mode": "TOOL_CHOICE_MODE_NONE"}))
    assert [(c.name, json.loads(c.arguments_json)) for c in answer.tool_calls] == [
        ("get_weather", {"city": "Oslo"})
    ]
    assert answer.text == "" and answer.finish_reason == usage_pb2.FINISH_REASON_TOOL_CALLS
    assert silent.text == 'get_weather{"city": "Oslo"}' and not silent.tool_calls
    assert silent.usage.prompt_tokens == answer.usage.prompt_tokens, "tools are shown all the same"
    assert silent.usage.cached_tokens == silent.usage.prompt_tokens - 1


@pytest.mark.parametrize("limit", [5, 7, 8])
async def test_a_call_that_a_limit_cuts_is_text_with_a_flag(
    calling: Path, tmp_path: Path, limit: int
) -> None:
    async with whole_server(calling, tmp_path, cache__block_token_count=16) as served:
        request = asked(request_id="cut", max_output_tokens=limit)
        found = summed(await heard(served, request))
        assert found == whole(await served.inference.Generate(request))
    written = "".join(CALLING[4:limit])
    assert (found["malformed"], found["calls"]) == ([written], [])
    assert found["text"] == "Let me see. " + written
    assert found["finish_reason"] == usage_pb2.FINISH_REASON_LENGTH


async def test_a_call_that_is_whole_when_the_limit_comes_is_a_call(calling: Path, tmp_path: Path) -> None:
    async with whole_server(calling, tmp_path, cache__block_token_count=16) as served:
        answer = await served.inference.Generate(asked(max_output_tokens=9))
    assert [call.arguments_json for call in answer.tool_calls] == ['{"city": "Oslo"}']
    assert answer.finish_reason == usage_pb2.FINISH_REASON_LENGTH and not answer.malformed_tool_calls


@pytest.mark.parametrize("mode", ["TOOL_CHOICE_MODE_REQUIRED", "TOOL_CHOICE_MODE_NAMED"])
async def test_a_forced_call_begins_in_the_prompt_and_is_told_whole(tmp_path: Path, mode: str) -> None:
    script = ['"city": "Oslo"', "}}\n", "</tool_call>", "<eos>"]
    folder = chain_model_dir(tmp_path / "model", THINKING, script, first="{")
    choice = {"mode": mode, "name": "get_weather"} if mode.endswith("NAMED") else {"mode": mode}
    async with whole_server(folder, tmp_path / "blocks") as served:
        request = asked(tools=TOOLS[:1], tool_choice=choice, request_id="forced")
        plain = messages.TokenizeRequest(prompt=request.prompt)
        tokens = await served.inference.Tokenize(plain)
        answer = await served.inference.Generate(request)
        assert summed(await heard(served, request)) == whole(answer)
    assert answer.usage.prompt_tokens > tokens.token_count
    (call,) = answer.tool_calls
    assert (call.name, call.arguments_json) == ("get_weather", '{"city": "Oslo"}')
    assert answer.finish_reason == usage_pb2.FINISH_REASON_TOOL_CALLS
    assert answer.text == "", "what the prompt began is a part of the call"


async def test_beside_other_requests_with_the_cache_and_without(babbling: Path, tmp_path: Path) -> None:
    """Chats with tools, a forced call and plain texts in one batch each get what they get alone."""
    forced = {"tool_choice": {"mode": "TOOL_CHOICE_MODE_NAMED", "name": "get_time"}}
    requests = [
        asked(),
        asked(**forced),
        asked(sampling={"temperature": 0.9, "seed": 5}),
        messages.GenerateRequest(prompt={"text": "Once upon a time there was"}, max_output_tokens=24),
        messages.GenerateRequest(prompt={"text": "Is it raining?"}, max_output_tokens=30),
    ]
    found: list[list[Any]] = []
    for enabled in (True, False):
        async with whole_server(
            babbling, tmp_path, cache__block_token_count=16, cache__enabled=enabled
        ) as served:
            for _ in range(2):
                alone = [await served.inference.Generate(request) for request in requests]
                found.append([(list(a.token_ids), a.text, a.reasoning) for a in alone])
            together = await asyncio.gather(*(served.inference.Generate(request) for request in requests))
            found.append([(list(a.token_ids), a.text, a.reasoning) for a in together])
            streams = await asyncio.gather(*(heard(served, request) for request in requests))
            sums = [summed(stream) for stream in streams]
            found.append([(s["token_ids"], s["text"], s["reasoning"]) for s in sums])
    assert all(answers == found[0] for answers in found)
    assert [(call.name, json.loads(call.arguments_json)) for call in alone[1].tool_calls] == [
        ("get_time", {})
    ]
    assert alone[1].text == "" and alone[1].finish_reason == usage_pb2.FINISH_REASON_TOOL_CALLS


async def test_with_tools_and_a_schema_a_reply_is_a_call_or_an_answer_that_fits(
    babbling: Path, tmp_path: Path
) -> None:
    """As agents ask whose last answer has a type: OpenAI's Agents SDK sends both with each turn."""
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    rains = {"type": "object", "properties": {"rains": {"type": "boolean"}}, "required": ["rains"]}
    fields = {
        "tools": [{"name": "get_weather", "parameters_json": json.dumps(city)}],
        "tool_choice": {"parallel_tool_calls": False},
        "response_format": {"json_schema": json.dumps(rains)},
        "max_reasoning_tokens": 0,
        "max_output_tokens": 400,
    }
    kinds = set()
    async with whole_server(babbling, tmp_path) as served:
        for seed in range(16):
            sampling = {"temperature": 8.0, "seed": seed}
            answer = await served.inference.Generate(asked(**fields, sampling=sampling))
            kinds.add(answer.finish_reason)
            assert not answer.malformed_tool_calls and bool(answer.tool_calls) != bool(answer.text)
            if answer.text:
                assert isinstance(json.loads(answer.text)["rains"], bool)
            for call in answer.tool_calls:
                assert call.name == "get_weather"
                assert json.loads(call.arguments_json)["city"] in ("Oslo", "Rome")
    assert kinds == {usage_pb2.FINISH_REASON_TOOL_CALLS, usage_pb2.FINISH_REASON_STOP_TOKEN}
