"""Turns of a conversation and its tools, from Anthropic's messages."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

from icehouse_client import Image, Message, Options, Tool, ToolCall

from icehouse_http.chat.turns import function_of
from icehouse_http.field_names import Turn
from icehouse_http.fields import Fields

_NOT_SHOWN = ("redacted_thinking",)
"""Blocks that another server wrote for itself."""


def turns_of(fields: Fields) -> list[Turn]:
    """Return the conversation, the system's text first; raises ApiError for what is none."""
    system, images = _content_of(fields, "system")
    if images:
        raise fields.refusal("system", "has an image; only text is allowed there")
    turns = [Turn(Message("system", system), "system")] if system else []
    told = list(fields.objects("messages"))
    if not told:
        raise fields.refusal("messages", "must have at least one message")
    for turn in told:
        turn.require("content")
        turns += (Turn(message, turn.place_of("content")) for message in _messages_of(turn))
    return turns


def _messages_of(turn: Fields) -> Iterable[Message]:
    match turn.one_of("role", "user", "assistant", "system", default=""):
        case "assistant":
            return [_assistant_turn(turn)]
        case "user":
            return _user_turns(turn)
        case _:
            return [Message("system", _content_of(turn, "content")[0])]


def _user_turns(turn: Fields) -> Iterator[Message]:
    """Return the results of tools, each a turn of its own, and what the user says beside them."""
    blocks = list(turn.parts("content"))
    results = [block for block in blocks if block.text("type") == "tool_result"]
    for block in results:
        content, images = _content_of(block, "content")
        if block.flag("is_error"):
            content = f"Error: {content}"
        yield Message("tool", content, tool_call_id=block.required_text("tool_use_id"), images=images)
    said = [block for block in blocks if block not in results]
    if said or not results:
        content, images = _joined(said)
        yield Message("user", content, images=images)


def _assistant_turn(turn: Fields) -> Message:
    content = reasoning = ""
    calls: list[ToolCall] = []
    for block in turn.parts("content"):
        match block.text("type"):
            case "text":
                content += block.text("text")
            case "thinking":
                reasoning += block.text("thinking")
            case "tool_use":
                arguments = json.dumps(block.mapping("input") or {}, ensure_ascii=False)
                calls.append(ToolCall(block.text("id"), block.required_text("name"), arguments))
            case kind if kind not in _NOT_SHOWN:
                raise _unread(block)
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls))


def _content_of(fields: Fields, name: str) -> tuple[str, tuple[Image, ...]]:
    return _joined(fields.parts(name))


def _joined(blocks: Iterator[Fields] | list[Fields]) -> tuple[str, tuple[Image, ...]]:
    """Return the texts with an empty line between two of them, and the images among them."""
    content = ""
    images: list[Image] = []
    for block in blocks:
        match block.text("type"):
            case "text":
                text = block.text("text")
                content += f"\n\n{text}" if content and text else text
            case "image":
                images.append(_image_of(block.required_object("source"), len(content)))
            case "tool_reference":
                line = f"The tool {block.required_text('tool_name')} can be called now."
                content += f"\n{line}" if content else line
            case _:
                raise _unread(block)
    return content, tuple(images)


def _unread(block: Fields) -> Exception:
    return block.refusal("type", f"is {block.text('type')[:40]!r}; such blocks are not supported")


def _image_of(source: Fields, position: int) -> Image:
    if source.one_of("type", "base64", "url", default="") == "url":
        return Image(uri=source.required_text("url"), position=position)
    try:
        data = base64.b64decode(source.required_text("data"), validate=True)
    except (binascii.Error, ValueError):
        raise source.refusal("data", "is not base64") from None
    return Image(data, source.text("media_type"), position)


def _referenced(fields: Fields) -> Iterable[str]:
    """Return the names of tools that results refer to, each once and in that order."""
    blocks = (block for turn in fields.objects("messages") for block in turn.parts("content"))
    results = (block for block in blocks if block.text("type") == "tool_result")
    parts = (part for result in results for part in result.parts("content"))
    return dict.fromkeys(part.text("tool_name") for part in parts if part.text("type") == "tool_reference")


@dataclasses.dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools, and where each is in the request."""

    tools: tuple[Tool, ...]
    places: tuple[str, ...]


def tools_of(fields: Fields) -> OfferedTools:
    """Return the tools.

    A tool whose loading is deferred is there once a result refers to it. It comes behind the others, so that
    the prompt stays as it was up to the end of their list, also where the server sorts tools.
    """
    known: dict[str, Tool] = {}
    deferred: dict[str, Tool] = {}
    for tool in fields.objects("tools"):
        if (kind := tool.text("type", "custom")) != "custom":
            raise tool.refusal("type", f"is {kind[:40]!r}; Anthropic's server tools are not supported")
        function = function_of(tool, "input_schema")
        if tool.flag("defer_loading"):
            deferred[tool.place] = dataclasses.replace(function, found_later=True)
        else:
            known[tool.place] = function
    places = {function.name: place for place, function in deferred.items()}
    found = (places[name] for name in _referenced(fields) if name in places)
    known |= {place: deferred[place] for place in found}
    return OfferedTools(tuple(known.values()), tuple(known))


def tool_options(fields: Fields, tools: Sequence[Tool]) -> Options:
    """Return the tools and whether they are called."""
    options: Options = {"tools": list(tools)} if tools else {}
    if (choice := fields.object("tool_choice")) is None:
        return options
    match choice.one_of("type", "auto", "any", "tool", "none", default=""):
        case "any":
            options["tool_choice"] = "required"
        case "tool":
            options["tool_choice"] = Tool(choice.required_text("name"))
        case "none":
            options["tool_choice"] = "none"
    if choice.flag("disable_parallel_tool_use") and tools:
        options["parallel_tool_calls"] = False
    return options
