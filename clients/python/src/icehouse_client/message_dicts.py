"""Messages as dicts: what `Conversation.to_json` writes, and what OpenAI's API and its clients have.

Of the latter: content in parts, pictures by their URI, tool calls as functions, `reasoning_content`. A field
that is None, or an empty list, counts as not there, so that an answer's own dict is a message too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from icehouse.v1 import prompt_pb2

from icehouse_client.chat import Image, Message, ToolCall, content_of

Turn = Message | Mapping[str, Any]
"""One message of a conversation."""

_TEXTS = ("role", "content", "name", "reasoning", "tool_call_id")
_KNOWN = {*_TEXTS, "reasoning_content", "token_ids", "tool_calls", "parts"}


def messages_of(turns: Sequence[Turn]) -> list[Message]:
    """Return the messages; raises ValueError for a dict that is none, which it names by its place."""
    return [
        message_of(turn, f"messages[{index}]") if isinstance(turn, Mapping) else turn
        for index, turn in enumerate(turns)
    ]


def check_is_chat(turns: Sequence[Turn]) -> None:
    """Raise TypeError for a text or token ids, ValueError for no message at all."""
    if not all(isinstance(turn, Message | Mapping) for turn in turns):
        raise TypeError("a chat is a list of Message or dicts; generate takes a text or token ids too")
    if not turns:
        raise ValueError("the conversation has no messages; it needs at least one")


def message_of(facts: object, place: str) -> Message:
    """Return the message that a dict is; raises ValueError with its place for what is none."""
    if not isinstance(facts, Mapping):
        raise ValueError(f"{place} is not an object")
    given: dict[str, Any] = {
        name: value for name, value in facts.items() if value is not None and value != []
    }
    if unknown := given.keys() - _KNOWN:
        raise ValueError(f"{place} has {', '.join(map(repr, sorted(unknown)))}, which is not known")
    if "reasoning_content" in given:
        given.setdefault("reasoning", given.pop("reasoning_content"))
    if "parts" in given:
        given["content"], given["images"] = _kept_parts(given.pop("parts"), f"{place}.parts")
    elif isinstance(given.get("content"), Sequence) and not isinstance(given["content"], str):
        given["content"], given["images"] = _parts(given["content"], f"{place}.content")
    for name in _TEXTS:
        if not isinstance(given.get(name, ""), str):
            raise ValueError(f"{place}.{name} is not a string")
    if not given.get("role"):
        raise ValueError(f"{place} has no role")
    token_ids = given.get("token_ids", ())
    if not isinstance(token_ids, Sequence) or not all(type(i) is int for i in token_ids):
        raise ValueError(f"{place}.token_ids is not a list of numbers")
    calls = given.get("tool_calls", ())
    if not isinstance(calls, Sequence):
        raise ValueError(f"{place}.tool_calls is not a list")
    given["tool_calls"] = tuple(_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls))
    return Message(**{"content": "", **given, "token_ids": tuple(token_ids)})


def _call(facts: object, place: str) -> ToolCall:
    """Return a call as `to_json` writes it, or as OpenAI's API has it."""
    if isinstance(facts, Mapping):
        function = facts.get("function", facts)
        if isinstance(function, Mapping):
            arguments = function.get("arguments", function.get("arguments_json"))
            if isinstance(arguments, Mapping):
                arguments = json.dumps(arguments, ensure_ascii=False)
            call_id, name = facts.get("id", ""), function.get("name")
            if isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str):
                return ToolCall(call_id, name, arguments)
    raise ValueError(f"{place} is not a call with a name and arguments")


def _parts(parts: Sequence[object], place: str) -> tuple[str, tuple[Image, ...]]:
    """Return the content and the images of OpenAI's parts."""
    content = ""
    images: list[Image] = []
    for index, part in enumerate(parts):
        facts = part if isinstance(part, Mapping) else {}
        kind, value = facts.get("type"), facts.get(str(facts.get("type")))
        if kind == "text" and isinstance(value, str):
            content += value
        elif kind == "image_url":
            shown: Any = value if isinstance(value, Mapping) else {"url": value}
            if not isinstance(shown.get("url"), str):
                raise ValueError(f"{place}[{index}].image_url has no url")
            detail: Any = shown.get("detail") or "auto"
            images.append(Image(position=len(content), detail=detail, uri=shown["url"]))
        else:
            raise ValueError(f"{place}[{index}] is neither a text nor an image_url")
    return content, tuple(images)


def _kept_parts(facts: object, place: str) -> tuple[str, tuple[Image, ...]]:
    """Return the content and the images of parts as `to_json` writes them."""
    if not isinstance(facts, Sequence):
        raise ValueError(f"{place} is not a list of texts and images")
    try:
        return content_of([json_format.ParseDict(part, prompt_pb2.ContentPart()) for part in facts])
    except (json_format.ParseError, ValueError) as error:
        raise ValueError(f"{place} is not a list of texts and images: {error}") from error
