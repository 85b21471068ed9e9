"""Turns of a conversation and its tools, from OpenAI's messages."""

from __future__ import annotations

from typing import Any

from icehouse_client import Image, Message, Options, Tool, ToolCall

from icehouse_http.field_names import Turn
from icehouse_http.fields import Fields

_SPEAKING = ("system", "developer", "user")
"""Roles whose turns are nothing but what they say."""
ROLES = (*_SPEAKING, "assistant", "tool")
_DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}
"""What the server knows of the words for how closely an image is looked at."""


def turns_of(fields: Fields) -> list[Turn]:
    """Return the conversation; raises ApiError for what is none."""
    turns = [Turn(_message_of(turn), turn.place) for turn in fields.objects("messages")]
    if not turns:
        raise fields.refusal("messages", "must have at least one message")
    return turns


def _message_of(turn: Fields) -> Message:
    role = turn.one_of("role", *ROLES, default="")
    if role in _SPEAKING:
        turn.require("content")
    content, images = content_of(turn, "content")
    return Message(
        role,
        content or turn.text("refusal"),
        name=turn.text("name") or None,
        reasoning=turn.text("reasoning_content") or turn.text("reasoning"),
        tool_calls=tuple(_call_of(call) for call in turn.objects("tool_calls")),
        tool_call_id=turn.text("tool_call_id"),
        images=images,
    )


def content_of(turn: Fields, name: str) -> tuple[str, tuple[Image, ...]]:
    """Return the texts of some content, joined, and its images where they are among them."""
    content = ""
    images: list[Image] = []
    for part in turn.parts(name):
        match part.text("type"):
            case "text" | "input_text" | "output_text":
                content += part.text("text")
            case "refusal":
                content += part.text("refusal")
            case "image_url":
                images.append(_image_of(part, len(content)))
            case "input_image":
                images.append(image(part, "image_url", position=len(content)))
            case kind:
                raise part.refusal("type", f"is {kind[:40]!r}; only text and images are supported")
    return content, tuple(images)


def _image_of(part: Fields, position: int) -> Image:
    if isinstance(part.raw("image_url"), str):
        return image(part, "image_url", position=position)
    return image(part.required_object("image_url"), "url", position=position)


def image(fields: Fields, name: str, *, position: int) -> Image:
    """Return the image whose URL is in a field, with the detail beside it."""
    detail: Any = _DETAILS[fields.one_of("detail", *_DETAILS, default="auto")]
    return Image(uri=fields.required_text(name), detail=detail, position=position)


def _call_of(call: Fields) -> ToolCall:
    function = call.required_object("function")
    return ToolCall(call.text("id"), function.required_text("name"), function.text("arguments") or "{}")


def tools_of(fields: Fields) -> list[Tool]:
    """Return the functions that may be called."""
    if fields.items("functions"):
        raise fields.refusal("functions", "are not supported; send tools, which replaced them")
    tools = []
    for tool in fields.objects("tools"):
        if (kind := tool.text("type", "function")) != "function":
            raise tool.refusal("type", f"is {kind[:40]!r}; only functions can be called")
        tools.append(function_of(tool.required_object("function")))
    return tools


def function_of(function: Fields, schema: str = "parameters") -> Tool:
    """Return a function whose arguments' schema is in the field `schema`."""
    return Tool(
        function.required_text("name"),
        function.text("description"),
        function.mapping(schema),
        function.flag("strict"),
    )


def tool_options(fields: Fields, tools: list[Tool]) -> Options:
    """Return the tools and whether they are called, in chat's and in responses' spelling."""
    options: Options = {"tools": tools} if tools else {}
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict):
        chosen = Fields(choice, fields.place_of("tool_choice"))
        match chosen.text("type"):
            case "function":
                named = chosen.object("function") or chosen
                options["tool_choice"] = Tool(named.required_text("name"))
            case "allowed_tools":
                _allow(options, chosen.object("allowed_tools") or chosen)
            case kind:
                raise chosen.refusal("type", f"is {kind[:40]!r}; it must be function or allowed_tools")
    else:
        word: Any = fields.one_of("tool_choice", "auto", "none", "required", default="auto")
        if word != "auto":
            options["tool_choice"] = word
    if not fields.flag("parallel_tool_calls", default=True) and tools:
        options["parallel_tool_calls"] = False
    return options


def _allow(options: Options, allowed: Fields) -> None:
    mode: Any = allowed.one_of("mode", "auto", "required", default="auto")
    options["tool_choice"] = mode
    options["allowed_tools"] = [
        Tool((tool.object("function") or tool).required_text("name")) for tool in allowed.objects("tools")
    ]
