"""Call form: the grammar of a reply whose tool calls are constrained. Pure.

A constrained call is the template's own text around the arguments, so that the model writes what it was
trained to write. Only notations that write arguments as JSON can be constrained; to find out, the model's
reader is given an example.

Calls must be constrained if the request has strict tools, allowed tools or no parallel calls. If it only
requires a call, or wants its answer in JSON, they are constrained where possible. Such a call fits its tool's
schema if that can be enforced. If a tool is named, the reply has exactly one call.
"""

from __future__ import annotations

import dataclasses
import json

from icehouse_server.domain.chat import Conversation, Tool, ToolCall, ToolMode
from icehouse_server.domain.response_format import JsonTag, TaggedJson
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.replies.recognition import ReadBackScore, read_back
from icehouse_server.text.replies.reply_format import ReplyFormat

NAME = "qzcalledqz"
"""The placeholder for a tool's name in a call that the template writes."""
_EXAMPLE_ARGUMENTS = '{"qzkeyqz": [1, {"a": "}"}]}'
_ANY_ARGUMENTS = '{"type": "object"}'
_CLOSINGS = ("}]", "}", "]", "")
"""What may follow the arguments in notations without an end marker."""


def around_arguments(shown: str, conversation: Conversation, format: ReplyFormat) -> tuple[str, str] | None:
    """Return what a call of `NAME` has before its arguments and after them, or None if the model does not
    write arguments as JSON; raises InvalidRequest if calls must be constrained.

    `shown` is text from the template that ends with such a call, with empty arguments.
    """
    begin, shown_end = _split(shown, format)
    for end in (shown_end,) if format.family.call_end else _CLOSINGS:
        if _reads(f"{begin}{_EXAMPLE_ARGUMENTS}{end}", format):
            return begin, end
    _check_free(conversation)
    return None


def call_form(
    conversation: Conversation, format: ReplyFormat, around: tuple[str, str], opening: str
) -> TaggedJson | None:
    """Return the form of a reply to a prompt that ends with `opening` of a call; None and raises as above."""
    begin, end = around
    is_held = conversation.tool_choice.is_forced or conversation.answers_in_json
    tags = tuple(
        JsonTag(
            begin.replace(NAME, tool.name),
            json.dumps(tool.parameters) if tool.is_strict or is_held else _ANY_ARGUMENTS,
            end,
            field=f"prompt.tools[{index}].parameters_json",
        )
        for index, tool in conversation.callable_tools
    )
    if not all(tag.begin.startswith(opening) for tag in tags):
        _check_free(conversation)
        return None
    choice = conversation.tool_choice
    may_repeat = choice.is_parallel and choice.mode is not ToolMode.NAMED
    if opening:
        return TaggedJson(tags, may_repeat, opening=opening)
    if conversation.answers_in_json and format.family.layout is None:
        return TaggedJson(tags, may_repeat)
    markers = tuple(filter(None, (format.think_start, format.think_end)))
    return TaggedJson(tags, may_repeat, trigger=format.family.call_start, markers=markers)


def loosened(form: TaggedJson, conversation: Conversation) -> TaggedJson:
    """Return the form with the schemas of strict tools only: other tools' schemas are a wish."""
    tags = (
        tag if tool.is_strict else dataclasses.replace(tag, schema=_ANY_ARGUMENTS)
        for tag, (_, tool) in zip(form.tags, conversation.callable_tools, strict=True)
    )
    return dataclasses.replace(form, tags=tuple(tags))


def _split(shown: str, format: ReplyFormat) -> tuple[str, str]:
    """Return what the call has before its arguments and after them; two empty texts if there is no call."""
    name_start = shown.rfind(NAME)
    start = shown.rfind(format.family.call_start, 0, max(0, name_start))
    arguments_start = shown.find("{}", name_start)
    if not format.family.call_start or min(name_start, start, arguments_start) < 0:
        return "", ""
    rest = shown[arguments_start + len("{}") :]
    end = (
        rest[: rest.find(format.family.call_end)] + format.family.call_end
        if format.family.call_end in rest
        else ""
    )
    return shown[start:arguments_start], end if format.family.call_end else ""


def _reads(example: str, format: ReplyFormat) -> bool:
    """Whether the model's reader finds exactly the example's call, without repairs."""
    call = ToolCall("", NAME, _EXAMPLE_ARGUMENTS)
    return read_back(format, example, tools=[Tool(NAME, "", {})], calls=[call]) is ReadBackScore.ALL


def _check_free(conversation: Conversation) -> None:
    """Raise InvalidRequest if calls must be constrained."""
    if not conversation.constrains_calls:
        return
    strict = (index for index, tool in conversation.callable_tools if tool.is_strict)
    index = next(strict, None)
    field = "tool_choice" if index is None else f"prompt.tools[{index}].strict"
    raise InvalidRequest(
        Reason.TOOLS_UNSUPPORTED,
        f"{field} asks to constrain tool calls, but this model does not write their arguments as JSON; leave "
        "strict, allowed and parallel_tool_calls out",
        field=field,
    )
