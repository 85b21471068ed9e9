"""Form of turns and tools as templates read them. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from icehouse_server.domain.chat import ChatMessage, Tool, ToolCall
from icehouse_server.text.chat.traits import Arguments, EmptyContent, TemplateTraits, ToolForm

_DEPTH_LIMIT = 16
"""Schemas inside a schema that are completed."""


def form_of(message: ChatMessage, traits: TemplateTraits) -> dict[str, Any]:
    """Return a turn as the template reads it."""
    form: dict[str, Any] = {"role": message.role, "content": _content_of(message, traits)}
    if message.name:
        form["name"] = message.name
    if message.reasoning and traits.reasoning_key:
        form[traits.reasoning_key] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [_form_of_call(call, traits) for call in message.tool_calls]
    if message.tool_call_id:
        form["tool_call_id"] = message.tool_call_id
    return form


def offer(tool: Tool, form: ToolForm = ToolForm.WRAPPED) -> dict[str, Any]:
    """Return a tool as templates and parsers of calls want it."""
    is_whole = form is not ToolForm.WRAPPED
    function: dict[str, Any] = {"name": tool.name}
    if tool.description or is_whole:
        function["description"] = tool.description
    function["parameters"] = _completed(tool.parameters) if is_whole else tool.parameters
    return function if form is ToolForm.PLAIN else {"type": "function", "function": function}


def _form_of_call(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": _arguments_of(call.arguments_json, traits.arguments)},
    }


def _arguments_of(text: str, form: Arguments) -> str | dict[str, Any]:
    """Return a call's arguments; where they must be an object, any other text is put into one."""
    if form is Arguments.VERBATIM:
        return text
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    arguments = parsed if isinstance(parsed, dict) else {"arguments": text}
    return arguments if form is Arguments.OBJECT else json.dumps(arguments, ensure_ascii=False)


def _content_of(message: ChatMessage, traits: TemplateTraits) -> str | list[dict[str, str]] | None:
    if message.reasoning and not traits.reasoning_key:
        thought = {"type": "thinking", "thinking": message.reasoning}
        return [thought, *(_parts_of(message) if message.content else [])]
    empty_content = (
        traits.empty_content if message.role == "assistant" and not message.content else EmptyContent.TEXT
    )
    if message.images or message.role in traits.part_roles or empty_content is EmptyContent.PARTS:
        return _parts_of(message)
    return None if message.tool_calls and empty_content is EmptyContent.NONE else message.content


def _parts_of(message: ChatMessage) -> list[dict[str, str]]:
    """Return text and images as templates of vision models want them."""
    parts: list[dict[str, str]] = []
    start = 0
    for position in (*(placed.position for placed in message.images), len(message.content)):
        if position > start:
            parts.append({"type": "text", "text": message.content[start:position]})
        parts.append({"type": "image"})
        start = position
    parts.pop()
    return parts or [{"type": "text", "text": ""}]


def _completed(schema: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {"type": "object", "properties": {}, "required": [], **schema}
    return _described(whole, depth=0)


def _described(schema: Mapping[str, Any], *, depth: int) -> dict[str, Any]:
    """Return the schema with a type and a description for every property, nested ones too."""
    described = dict(schema)
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or depth > _DEPTH_LIMIT:
        return described
    described["properties"] = {
        name: _described_field(field if isinstance(field, Mapping) else {}, depth=depth + 1)
        for name, field in properties.items()
    }
    return described


def _described_field(field: Mapping[str, Any], *, depth: int) -> dict[str, Any]:
    return {"type": _type_of(field), "description": "", **_described(field, depth=depth)}


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return the first type among a schema's alternatives, for a schema without a type."""
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found = choice.get("type") if isinstance(choice, Mapping) else None
        if isinstance(found, str) and found != "null":
            return found
    return "string"
