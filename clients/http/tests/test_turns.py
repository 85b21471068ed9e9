"""Turns, tools and images of each protocol: what they become."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from icehouse.v1.inference_service_pb2 import Delta, StreamResponse
from icehouse.v1.model_service_pb2 import Model
from icehouse.v1.tool_pb2 import ToolCallDelta
from icehouse_client import Image, Message, Tool, ToolCall
from icehouse_http.chat import request as chat
from icehouse_http.fields import Fields
from icehouse_http.messages import request as messages
from icehouse_http.responses import request as responses
from icehouse_http.responses.answer import ResponseAnswer
from icehouse_http.responses.functions import CallName, functions_of
from icehouse_http.responses.items import items_of
from icehouse_http.responses.store import ResponseStore
from icehouse_http.settings import Settings
from icehouse_http.upstream import Target

THINKER = Model(id="m")
THINKER.reply_format.reasoning_end = "</think>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
PIXELS = b"\x89PNG"
DATA_URI = "data:image/png;base64," + base64.b64encode(PIXELS).decode()


def chat_of(model: Model = THINKER, **fields: Any) -> Any:
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    return chat.asked_of(Fields(said | fields), Target(model), {}, Settings())


def messages_of(model: Model = THINKER, **fields: Any) -> Any:
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    return messages.asked_of(Fields(said | fields), Target(model), {}, Settings())


def responses_of(model: Model = THINKER, **fields: Any) -> Any:
    store = ResponseStore(max_entries=1, max_bytes=1)
    given = Fields({"input": "Hi"} | fields)
    return responses.asked_of(given, Target(model), {}, Settings(), store=store, scope="").asked


def test_images_stay_where_they_are() -> None:
    expected = Message("user", "Look: here.", images=(Image(uri=DATA_URI, position=6, detail="low"),))
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": DATA_URI, "detail": "low"}},
        {"type": "text", "text": "here."},
    ]
    assert chat_of(messages=[{"role": "user", "content": parts}]).prompt == [expected]
    items = [
        {"type": "input_text", "text": "Look: "},
        {"type": "input_image", "image_url": DATA_URI, "detail": "low"},
        {"type": "input_text", "text": "here."},
    ]
    assert responses_of(input=[{"role": "user", "content": items}]).prompt == [expected]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PIXELS).decode()}
    blocks = [
        {"type": "text", "text": "Look:"},
        {"type": "image", "source": source},
        {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
    ]
    shown = (Image(PIXELS, "image/png", 5), Image(uri="https://a/b.png", position=5))
    assert messages_of(messages=[{"role": "user", "content": blocks}]).prompt == [
        Message("user", "Look:", images=shown)
    ]


def test_an_image_may_be_looked_at_as_it_is() -> None:
    shown = {"url": DATA_URI, "detail": "original"}
    [turn] = chat_of(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": shown}]}]
    ).prompt
    part = {"type": "input_image", "image_url": DATA_URI, "detail": "original"}
    assert responses_of(input=[{"role": "user", "content": [part]}]).prompt == [turn]
    assert turn.images[0].detail == "high"


def test_a_turn_may_say_nothing() -> None:
    nothing: list[Any] = ["", [], [{"type": "text", "text": ""}]]
    for asked in (chat_of, messages_of):
        for content in nothing:
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
            said = asked(messages=turns).prompt
            assert said == [Message("user", ""), Message("assistant", "")]


def test_results_are_turns_of_their_own_before_what_the_user_says() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "dry"}]},
        {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
        {"type": "text", "text": "And now?"},
        {"type": "text", "text": "Quick."},
    ]
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "look", "input": {"a": "é"}},
    ]
    turns = [{"role": "assistant", "content": said}, {"role": "user", "content": blocks}]
    call = ToolCall("1", "look", '{"a": "é"}')
    assert messages_of(system="Be kind.", messages=turns).prompt == [
        Message("system", "Be kind."),
        Message("assistant", "I look.", reasoning="Hm.", tool_calls=(call,)),
        Message("tool", "dry", tool_call_id="1"),
        Message("tool", "Error: no", tool_call_id="2"),
        Message("user", "And now?\n\nQuick."),
    ]


def test_items_between_two_others_are_one_turn() -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": "dry"},
    ]
    calls = (ToolCall("1", "look", "{}"), ToolCall("2", "look", "{}"))
    assert responses_of(instructions="Obey.", input=items).prompt == [
        Message("system", "Obey."),
        Message("developer", "Be kind."),
        Message("assistant", "I look.", reasoning="Hm.", tool_calls=calls),
        Message("tool", "dry", tool_call_id="1"),
    ]


LOOK, GO = Tool("look", "Looks.", SCHEMA, True), Tool("go")
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
ALLOWED = [{"type": "function", "name": "go"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", {}),
        ("none", {"tool_choice": "none"}),
        ("required", {"tool_choice": "required"}),
        ({"type": "function", "name": "go"}, {"tool_choice": GO}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": ALLOWED},
            {"tool_choice": "required", "allowed_tools": [GO]},
        ),
    ],
)
def test_tools_and_choices_of_openai(choice: Any, expected: dict[str, Any]) -> None:
    flat = [{"type": "function", **FUNCTION}, {"type": "function", "name": "go"}, {"type": "web_search"}]
    nested = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "go"}}]
    for asked in (
        responses_of(tools=flat, tool_choice=choice, parallel_tool_calls=False),
        chat_of(tools=nested, tool_choice=choice, parallel_tool_calls=False),
    ):
        names = ("tools", "tool_choice", "allowed_tools", "parallel_tool_calls")
        told = {name: asked.options[name] for name in names if name in asked.options}
        assert told == {"tools": [LOOK, GO], "parallel_tool_calls": False, **expected}


def test_a_function_of_a_namespace_is_shown_with_it_and_called_without() -> None:
    """As Codex sends the tools of MCP servers."""
    group = {"type": "namespace", "name": "mcp__lake", "tools": [{"type": "function", "name": "go"}]}
    group["tools"] += [{"type": "custom", "name": "draw"}]
    called = {"type": "function_call", "call_id": "1", "name": "go", "namespace": "mcp__lake"}
    asked = responses_of(tools=[group, {"type": "function", "name": "go"}], input=[called])
    assert asked.options["tools"] == [Tool("mcp__lake__go"), GO]
    assert asked.prompt == [Message("assistant", "", tool_calls=(ToolCall("1", "mcp__lake__go", "{}"),))]
    functions = functions_of(Fields({"tools": [group]}))
    for name, fields in (("mcp__lake__go", {"name": "go", "namespace": "mcp__lake"}), ("go", {"name": "go"})):
        reply: Any = SimpleNamespace(
            reasoning="", text="", tool_calls=(ToolCall("1", name, "{}"),), finish_reason="TOOL_CALLS"
        )
        piece = ToolCallDelta(id="1", name=name, arguments_json="{}")
        answer = ResponseAnswer("r", {}, functions, seals=False, keep=lambda *kept: None)
        events = (Delta(tool_call=piece), Delta(text="!"))
        frames = [frame.data for delta in events for frame in answer.feed(StreamResponse(delta=delta))]
        items = [frame["item"] for frame in frames if isinstance(frame, dict) and "item" in frame]
        for told in (*items_of(reply, functions, seals=False), *items[:2]):
            assert {key: told[key] for key in ("name", "namespace") if key in told} == fields


def test_a_long_name_in_a_namespace_is_shortened_to_what_a_server_takes() -> None:
    names = [CallName("go" * 20 + end, "mcp__lake" * 5).joined for end in ("a", "b")]
    assert [len(name) for name in names] == [64, 64] and names[0] != names[1]


def test_tools_and_choices_of_anthropic() -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA, "strict": True}
    tools = [tool, {"type": "custom", "name": "go"}]
    for choice, expected in (
        ({"type": "auto"}, {}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "go"}, {"tool_choice": GO}),
    ):
        options = messages_of(tools=tools, tool_choice=choice | {"disable_parallel_tool_use": True}).options
        assert options["tools"] == [LOOK, GO] and options["parallel_tool_calls"] is False
        assert {name: options[name] for name in ("tool_choice",) if name in options} == expected


def test_a_tool_that_is_searched_for_comes_behind_the_others() -> None:
    """As Claude Code does: what its search has found is in the result by name, and in the tools."""
    tools = [{"name": name, "defer_loading": name != "search"} for name in ("dig", "fly", "go", "search")]
    found = [{"type": "tool_reference", "tool_name": name} for name in ("go", "dig", "gone", "go")]
    blocks = [{"type": "tool_result", "tool_use_id": "1", "content": found[:3]}]
    again = [{"type": "tool_result", "tool_use_id": "2", "content": found[3:]}]
    call = {"type": "tool_use", "id": "1", "name": "search", "input": {}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [call | {"id": "2"}]},
        {"role": "user", "content": again},
    ]
    assert messages_of(tools=tools, messages=turns[:1]).options["tools"] == [Tool("search")]
    asked = messages_of(tools=tools, messages=turns)
    assert asked.options["tools"] == [
        Tool("search"),
        Tool("go", found_later=True),
        Tool("dig", found_later=True),
    ]
    lines = [f"The tool {name} can be called now." for name in ("go", "dig", "gone")]
    assert asked.prompt[2] == Message("tool", "\n".join(lines), tool_call_id="1")


def test_how_much_the_model_may_think() -> None:
    off, plain = {"enable_thinking": False}, Model(id="m", architecture="llama")

    def told(asked: Any) -> tuple[Any, Any]:
        return asked.options.get("max_reasoning_tokens"), asked.options.get("template_arguments")

    assert told(messages_of()) == told(messages_of(thinking={"type": "disabled"})) == (0, off)
    assert told(messages_of(plain)) == (None, off)
    assert told(messages_of(thinking={"type": "enabled", "budget_tokens": 2048})) == (2048, None)
    assert told(messages_of(thinking={"type": "adaptive"})) == (None, None)
    assert told(chat_of()) == (None, None)
    given = {"enable_thinking": True, "x": 1}
    assert told(chat_of(chat_template_kwargs=given, reasoning_effort="none")) == (0, given)


@pytest.mark.parametrize(
    ("effort", "limit", "word"),
    [
        ("none", 0, None),
        ("minimal", 512, "low"),
        ("low", 2048, "low"),
        ("medium", None, "medium"),
        ("high", None, "high"),
        ("xhigh", None, "high"),
        ("max", None, "high"),
    ],
)
def test_an_effort_means_the_same_in_every_protocol(effort: str, limit: int | None, word: str | None) -> None:
    adaptive = messages_of(thinking={"type": "adaptive"}, output_config={"effort": effort})
    for asked in (chat_of(reasoning_effort=effort), responses_of(reasoning={"effort": effort}), adaptive):
        assert asked.options.get("max_reasoning_tokens") == limit
        arguments = asked.options["template_arguments"]
        assert arguments == ({"reasoning_effort": word} if word else {"enable_thinking": False})


def test_an_effort_gives_way_to_what_a_request_says_more_exactly() -> None:
    low = {"effort": "low"}
    budget = messages_of(thinking={"type": "enabled", "budget_tokens": 4096}, output_config=low)
    assert budget.options["max_reasoning_tokens"] == 4096
    silent = messages_of(output_config=low)
    assert silent.options["max_reasoning_tokens"] == 0
    assert silent.options["template_arguments"] == {"reasoning_effort": "low", "enable_thinking": False}
    own = chat_of(reasoning_effort="max", chat_template_kwargs={"reasoning_effort": "max"})
    assert own.options["template_arguments"] == {"reasoning_effort": "max"}
