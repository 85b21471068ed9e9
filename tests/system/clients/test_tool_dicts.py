"""Tools as dicts: each shape that a caller may have, on its way to a server, and what is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from icehouse.v1 import tool_pb2
from icehouse_client import AsyncClient, Conversation, GivenTool, Infill, Message, Tool
from icehouse_client.requests import generate_request, tokenize_request
from icehouse_client.tool_dicts import tool_of

from tests.unit.rpc.conftest import RunningServer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("weather", "Tells it.", SCHEMA, strict=True)
FACTS = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}
OPENAI = {"type": "function", "function": FACTS}
FLAT = {"type": "function", **FACTS}
PROTO = {
    "name": "weather",
    "description": "Tells it.",
    "parameters_json": '{"type": "object", "properties": {"city": {"type": "string"}}}',
    "strict": True,
}
TURN = [Message("user", "Hi")]


@pytest.mark.parametrize("given", [OPENAI, FLAT, FACTS, PROTO])
def test_each_shape_is_the_same_tool(given: Mapping[str, Any]) -> None:
    assert tool_of(given, "tools[0]") == WEATHER


def test_what_is_not_there_may_be_none() -> None:
    sparse = {"name": "f", "description": None, "parameters": None, "strict": None}
    for given in (sparse, {"type": "function", "function": sparse}, {"name": "f", "parameters_json": ""}):
        assert tool_of(given, "tools[0]") == Tool("f")


async def test_every_call_with_tools_takes_them(served: RunningServer) -> None:
    talk = Conversation(TURN, tools=[OPENAI])
    assert talk.tools == (WEATHER,)
    async with AsyncClient(served.server.address) as client:
        await client.chat(TURN, tools=[WEATHER])
        await client.chat(TURN, tools=[OPENAI])
        await client.generate(TURN, tools=[PROTO])
        async for _ in client.stream(TURN, tools=[OPENAI]):
            pass
        await client.tokenize(TURN, tools=[FLAT])
        await client.cache.warm(TURN, tools=[OPENAI])
        await client.chat(talk)
        talk.tools = [PROTO]
        await client.tokenize(talk)
    first, *others = served.tokenizer.conversations
    assert [tool.name for tool in first.tools] == ["weather"]
    assert len(others) == 7 and all(other == first for other in others)
    asked = tokenize_request(Infill("a"), model="", tools=[OPENAI])
    assert [tool.name for tool in asked.prompt.tools] == ["weather"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "weather"}},
        {"type": "function", "name": "weather"},
        WEATHER,
    ],
)
def test_the_tool_to_be_called_may_be_a_dict(choice: Any) -> None:
    request = generate_request(TURN, {"tools": [OPENAI], "tool_choice": choice})
    wanted = tool_pb2.ToolChoice(mode=tool_pb2.TOOL_CHOICE_MODE_NAMED, name="weather")
    assert request.tool_choice == wanted


def test_the_tools_that_may_be_called_may_be_dicts() -> None:
    given: list[GivenTool] = [OPENAI, Tool("clock")]
    request = generate_request(TURN, {"tools": given, "allowed_tools": given, "tool_choice": "required"})
    assert list(request.tool_choice.allowed) == ["weather", "clock"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"name": "f", "paramaters": {}},
            "tools[1] has 'paramaters', which is not known; did you mean 'parameters'?",
        ),
        ({"name": "f", "input_schema": {}}, "did you mean 'parameters'?"),
        (
            {"name": "f", "x": 1},
            "there are description, found_later, name, parameters, parameters_json, strict",
        ),
        (
            {"type": "function", "function": {"nmae": "f"}},
            "tools[1].function has 'nmae', which is not known; did you mean 'name'?",
        ),
        ({"type": "function", "function": {"name": "f"}, "strict": True}, "tools[1] has 'strict'"),
        ({"type": "function", "function": "f"}, "tools[1].function is not an object"),
        ({"type": "web_search"}, "tools[1] is of type 'web_search'; only a function can be called"),
        ({"description": "d"}, "tools[1] has no name"),
        ({"name": ""}, "tools[1] has no name"),
        ({"name": 1}, "tools[1].name is int, not text"),
        ({"name": "f", "strict": "yes"}, "tools[1].strict is str, not True or False"),
        ({"name": "f", "parameters": "{}"}, "tools[1].parameters is str, not object"),
        ({"name": "f", "parameters_json": "[]"}, "tools[1].parameters is list, not object"),
        ({"name": "f", "parameters_json": "{"}, "tools[1].parameters_json is not JSON"),
        ({"name": "f", "parameters_json": SCHEMA}, "tools[1].parameters_json is not JSON"),
        ({**PROTO, "parameters": {}}, "tools[1] has both parameters and parameters_json"),
    ],
)
def test_what_is_no_tool_is_named(given: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        generate_request(TURN, {"tools": [WEATHER, given]})


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"type": "function"}, "tool_choice has no name"),
        ({"type": "function", "function": {}}, "tool_choice has no name"),
        ({"type": "allowed_tools"}, "tool_choice is of type 'allowed_tools'"),
        ({"type": "function", "function": {"nam": "f"}}, "did you mean 'name'?"),
        ("weather", "'auto', 'none', 'required'"),
    ],
)
def test_what_is_no_choice_is_named(choice: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        generate_request(TURN, {"tools": [WEATHER], "tool_choice": choice})
