"""Turns and tools have the form that a template reads, and tools every field that it may ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from icehouse_server.domain.chat import ChatMessage, Tool
from icehouse_server.text.chat.template import form_of, offer
from icehouse_server.text.chat.traits import Arguments, EmptyContent, TemplateTraits, ToolForm

from tests.fixtures.chat.families import tokenizer_of
from tests.fixtures.chat.histories import TEMPLATES, assistant, call, called, user
from tests.fixtures.models.chat_templates import Family

OPTIONAL = {"anyOf": [{"type": "null"}, {"type": "integer"}]}
NESTED = {"type": "object", "properties": {"inner": {}}}
TOOLS = (
    Tool("bare", "", {}),
    Tool("optional", "", {"properties": {"a": OPTIONAL, "b": True}}),
    Tool("nested", "", {"type": "object", "properties": {"a": NESTED}}),
    Tool("whole", "Does.", {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}}),
)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_template_that_asks_for_every_field_of_a_tool_finds_it(tool: Tool) -> None:
    template = tokenizer_of(Family(TEMPLATES["described_tools"]))._renderer.template
    assert f"{tool.name}(" in template.text([user("question one")], tools=[tool])


def test_only_what_is_missing_is_added() -> None:
    def parameters(tool: Tool) -> Any:
        return offer(tool, ToolForm.COMPLETE)["function"]["parameters"]

    assert parameters(TOOLS[0]) == {"type": "object", "properties": {}, "required": []}
    assert parameters(TOOLS[1])["properties"]["a"] == {"type": "integer", "description": "", **OPTIONAL}
    inner = parameters(TOOLS[2])["properties"]["a"]["properties"]["inner"]
    assert inner == {"type": "string", "description": ""}
    assert parameters(TOOLS[3]) == {**TOOLS[3].parameters, "required": []}
    assert offer(TOOLS[0]) == {"type": "function", "function": {"name": "bare", "parameters": {}}}


def test_a_schema_without_an_end_is_completed_as_far_as_templates_look() -> None:
    schema: dict[str, Any] = {}
    schema["properties"] = {"self": schema}
    assert offer(Tool("deep", "", schema), ToolForm.COMPLETE)["function"]["description"] == ""


def test_arguments_are_an_object_or_the_text_that_was_drawn() -> None:
    def arguments(form: Arguments) -> Any:
        turn = form_of(called(made), TemplateTraits(arguments=form))
        return turn["tool_calls"][0]["function"]["arguments"]

    made = call("c", "Oslo")
    assert arguments(Arguments.OBJECT) == json.loads(made.arguments_json)
    assert arguments(Arguments.VERBATIM) == arguments(Arguments.TEXT) == made.arguments_json


@pytest.mark.parametrize(
    ("empty_content", "beside_calls", "alone"),
    [
        (EmptyContent.TEXT, "", ""),
        (EmptyContent.PARTS, [{"type": "text", "text": ""}], [{"type": "text", "text": ""}]),
        (EmptyContent.NONE, None, ""),
    ],
)
def test_an_assistant_is_silent_as_the_template_wants_it(
    empty_content: EmptyContent, beside_calls: Any, alone: Any
) -> None:
    traits = TemplateTraits(empty_content=empty_content)
    assert form_of(called(call("c", "Oslo")), traits)["content"] == beside_calls
    assert form_of(ChatMessage("assistant", ""), traits)["content"] == alone
    assert form_of(called(call("c", "Oslo"), text="let me see"), traits)["content"] == "let me see"
    assert form_of(user(""), traits)["content"] == ""


def test_a_thought_is_a_part_of_the_content_where_the_template_has_no_key_for_it() -> None:
    parts = TemplateTraits(reasoning_key="")
    thought = {"type": "thinking", "thinking": "hm"}
    assert form_of(assistant("ho", reasoning="hm"), parts)["content"] == [
        thought,
        {"type": "text", "text": "ho"},
    ]
    assert form_of(assistant("", reasoning="hm"), parts)["content"] == [thought]
    assert form_of(assistant("ho"), parts)["content"] == "ho"
    assert form_of(assistant("ho", reasoning="hm"), TemplateTraits())["reasoning_content"] == "hm"
