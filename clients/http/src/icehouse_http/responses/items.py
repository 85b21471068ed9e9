"""Items of responses: from a request's input to messages, and from outputs to items."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from icehouse_client import FinishReason, Message, Reply, ToolCall

from icehouse_http.chat.turns import ROLES, content_of
from icehouse_http.field_names import Turn
from icehouse_http.fields import Fields
from icehouse_http.held import text_beside
from icehouse_http.responses.functions import Functions, call_name_of

_SEALED: Final = "icehouse:"
"""Begins reasoning that the caller keeps for us. It is encoded, not encrypted: the caller may read it."""

CUT: Final = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)
"""Reasons why an output ended before it was complete."""

Item = dict[str, Any]


def turns_of(fields: Fields, known: Callable[[str], Item | None]) -> list[Turn]:
    """Return the messages that the input is; raises ApiError for an item that cannot be read.

    `known` returns an item of an earlier response, which the input may name instead of repeating it. What the
    assistant thought, said and called between two other items is one message.
    """
    if isinstance(fields.raw("input"), str):
        return [Turn(Message("user", fields.text("input")), "input")]
    turns: list[Turn] = []
    for item in fields.objects("input"):
        message = _message_of(_referenced(item, known))
        if turns and message.role == turns[-1].message.role == "assistant":
            turns[-1] = Turn(_joined(turns[-1].message, message), turns[-1].place)
        else:
            turns.append(Turn(message, item.place))
    return turns


def _referenced(item: Fields, known: Callable[[str], Item | None]) -> Fields:
    """Return the item itself, or the one that it stands for."""
    if item.text("type") != "item_reference":
        return item
    found = known(item.required_text("id"))
    if found is None:
        raise item.refusal("id", "names an item that is not stored here; send the item itself")
    return Fields(found, item.place_of("id"))


def _message_of(item: Fields) -> Message:
    match item.text("type", "message"):
        case "message":
            item.require("content")
            content, images = content_of(item, "content")
            return Message(item.one_of("role", *ROLES, default=""), content, images=images)
        case "reasoning":
            return Message("assistant", "", reasoning=_reasoning_of(item))
        case "function_call":
            arguments = item.text("arguments") or "{}"
            call = ToolCall(item.required_text("call_id"), call_name_of(item).joined, arguments)
            return Message("assistant", "", tool_calls=(call,))
        case "function_call_output":
            content, images = content_of(item, "output")
            return Message("tool", content, tool_call_id=item.required_text("call_id"), images=images)
        case kind:
            raise item.refusal("type", f"is {kind[:40]!r}; such items are not supported")


def _joined(first: Message, second: Message) -> Message:
    return dataclasses.replace(
        first,
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _reasoning_of(item: Fields) -> str:
    if text := "".join(part.text("text") for part in item.objects("content")):
        return text
    sealed = item.text("encrypted_content")
    if not sealed.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        raise item.refusal("encrypted_content", "is not what the server sent") from None


def items_of(reply: Reply, functions: Functions, *, seals: bool) -> list[Item]:
    """Return the items of an output that was not streamed.

    A limit cuts its text, or its reasoning where it has nothing else: calls are always whole, and one that
    was cut is text.
    """
    is_cut, calls = reply.finish_reason in CUT, reply.tool_calls
    text = text_beside(calls, reply.text)
    items = []
    if reply.reasoning:
        is_last = not (text or calls)
        items.append(finished(begun("reasoning"), reply.reasoning, seals=seals, is_cut=is_cut and is_last))
    if text:
        items.append(finished(begun("message"), text, is_cut=is_cut))
    return items + [finished(begun_call(call, functions), call.arguments_json) for call in calls]


def begun(kind: str) -> Item:
    """Return reasoning or a message with nothing in it yet."""
    if kind == "reasoning":
        return _begun(kind, "rs") | {"summary": [], "content": []}
    return _begun(kind, "msg") | {"role": "assistant", "content": []}


def begun_call(call: ToolCall, functions: Functions) -> Item:
    """Return a call without its arguments."""
    name = functions.called(call.name).fields
    return _begun("function_call", "fc") | {"call_id": call.id, **name, "arguments": ""}


def _begun(kind: str, prefix: str) -> Item:
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}


def finished(item: Item, text: str, *, seals: bool = False, is_cut: bool = False) -> Item:
    """Return an item with all that it says; `seals` adds the reasoning in a form that callers send back."""
    done = item | {"status": "incomplete" if is_cut else "completed"}
    match item["type"]:
        case "reasoning":
            sealed = _SEALED + base64.b64encode(text.encode()).decode() if seals else None
            return done | {"content": [part_of("reasoning", text)], "encrypted_content": sealed}
        case "message":
            return done | {"content": [part_of("message", text)]}
        case _:
            return done | {"arguments": text}


def part_of(kind: str, text: str) -> dict[str, Any]:
    """Return the only part of reasoning or of a message."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def with_instructions(instructions: str, turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return a conversation behind its instructions, which the next response does not inherit."""
    return [Turn(Message("system", instructions), "instructions"), *turns] if instructions else turns
