"""Call form: what holds a reply's tool calls to what the request says of its tools. Pure functions.

A call is the template's own text around the arguments, so that a constrained model writes what it was
trained to write. Only notations with arguments as JSON can be constrained; whether a model's is one is found
by having its reader read an example.
"""

from __future__ import annotations

import json

from icehouse_server.domain.chat import CallPiece, Conversation, Piece, Tool
from icehouse_server.domain.response_format import JsonTag, TaggedJson
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.chat.turn_form import offer
from icehouse_server.text.replies.reply_format import ReplyFormat
from icehouse_server.text.replies.reply_splitter import ReplySplitter

EXAMPLE_NAME = "qzcalledqz"
"""Stands for a tool's name in a call that the template writes."""

_EXAMPLE_ARGUMENTS = '{"qzkeyqz": [1, {"a": "}"}]}'
_ANY_ARGUMENTS = '{"type": "object"}'
_CLOSINGS = ("}]", "}", "]", "")
"""What may follow the arguments in notations whose calls have no end of their own."""


def call_form_of(conversation: Conversation, format: ReplyFormat, *, shown: str, opening: str) -> TaggedJson:
    """Return the form of a conversation's reply.

    `shown` is a text of the template that ends with a call of `EXAMPLE_NAME` without arguments, `opening`
    what of a call the prompt has. Raises InvalidRequest where the model's notation is another.
    """
    begin, shown_end = _around_arguments(shown, format)
    ends = (shown_end,) if format.family.call_end else _CLOSINGS
    end = next((end for end in ends if _reads(f"{begin}{_EXAMPLE_ARGUMENTS}{end}", format)), None)
    if end is None:
        raise _unsupported(conversation)
    tags = tuple(
        JsonTag(
            begin.replace(EXAMPLE_NAME, tool.name),
            json.dumps(tool.parameters) if tool.is_strict else _ANY_ARGUMENTS,
            end,
            field=f"tools[{index}].parameters_json",
        )
        for index, tool in conversation.callable_tools
    )
    if not all(tag.begin.startswith(opening) for tag in tags):
        raise _unsupported(conversation)
    may_repeat = conversation.tool_choice.is_parallel
    if opening:
        return TaggedJson(tags, may_repeat, opening=opening)
    markers = tuple(filter(None, (format.think_start, format.think_end)))
    return TaggedJson(tags, may_repeat, trigger=format.family.call_start, markers=markers)


def _around_arguments(shown: str, format: ReplyFormat) -> tuple[str, str]:
    """Return the text of a call before its arguments and behind them; empty where there is none."""
    name_start = shown.rfind(EXAMPLE_NAME)
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
    """Whether the model's reader finds the example's call and nothing else, and repairs nothing."""
    if EXAMPLE_NAME not in example:
        return False
    splitter = ReplySplitter(format=format, tools=[offer(Tool(EXAMPLE_NAME, "", {}))], make_call_id=str)
    pieces: list[Piece] = [*splitter.push(example), *splitter.finish()]
    calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
    if splitter.good_count != 1 or len(calls) < len(pieces):
        return False
    arguments = "".join(call.arguments_json for call in calls)
    is_plain = not any(call.is_repaired or call.is_withdrawn for call in calls)
    return is_plain and bool(json.loads(arguments) == json.loads(_EXAMPLE_ARGUMENTS))


def _unsupported(conversation: Conversation) -> InvalidRequest:
    strict = (index for index, tool in conversation.callable_tools if tool.is_strict)
    index = next(strict, None)
    field = "tool_choice" if index is None else f"tools[{index}].strict"
    return InvalidRequest(
        Reason.TOOLS_UNSUPPORTED,
        f"{field} asks to constrain tool calls, but this model does not write their arguments as JSON; leave "
        "strict, allowed and parallel_tool_calls out",
        field=field,
    )
