"""Call form: what holds a reply's tool calls to what the request says of its tools. Pure functions.

A call is the template's own text around the arguments, so that a constrained model writes what it was
trained to write. Only notations with arguments as JSON can be constrained; whether a model's is one is found
by having mlx-lm's parser read an example.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from icehouse_server.domain.chat import Conversation, Tool
from icehouse_server.domain.response_format import JsonTag, TaggedJson
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.chat.turn_form import offer
from icehouse_server.text.reply_format import ReplyFormat

EXAMPLE_NAME = "qzcalledqz"
"""Stands for a tool's name in a call that the template writes."""

_EXAMPLE_ARGUMENTS = '{"qzkeyqz": [1, {"a": "}"}]}'
_ANY_ARGUMENTS = '{"type": "object"}'


def call_form_of(conversation: Conversation, format: ReplyFormat, *, shown: str, opening: str) -> TaggedJson:
    """Return the form of a conversation's reply.

    `shown` is a text of the template that ends with a call of `EXAMPLE_NAME` without arguments, `opening`
    what of a call the prompt has. Raises InvalidRequest where the model's notation is another.
    """
    begin, end = _around_arguments(shown, format)
    example = f"{begin}{_EXAMPLE_ARGUMENTS}{end}"
    if not _reads(example.removeprefix(format.call_start).removesuffix(format.call_end), format):
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
    return TaggedJson(tags, may_repeat, trigger=format.call_start, markers=markers)


def _around_arguments(shown: str, format: ReplyFormat) -> tuple[str, str]:
    """Return the text of a call before its arguments and behind them; empty where there is none."""
    name_start = shown.rfind(EXAMPLE_NAME)
    start = shown.rfind(format.call_start, 0, max(0, name_start))
    arguments_start = shown.find("{}", name_start)
    if not format.call_start or min(name_start, start, arguments_start) < 0:
        return "", ""
    rest = shown[arguments_start + len("{}") :]
    end = rest[: rest.find(format.call_end)] + format.call_end if format.call_end in rest else ""
    return shown[start:arguments_start], end if format.call_end else ""


def _reads(section: str, format: ReplyFormat) -> bool:
    """Whether the model's parser finds the example's call in a section, and nothing else."""
    if format.parse is None or EXAMPLE_NAME not in section:
        return False
    try:
        parsed = format.parse(section, [offer(Tool(EXAMPLE_NAME, "", {}))])
    except Exception:  # a parser raises what it likes about a text that is not its own
        return False
    calls = parsed if isinstance(parsed, list) else [parsed]
    return len(calls) == 1 and _is_example(calls[0])


def _is_example(call: Any) -> bool:
    if not isinstance(call, Mapping) or call.get("name") != EXAMPLE_NAME:
        return False
    arguments = call.get("arguments")
    wanted = json.loads(_EXAMPLE_ARGUMENTS)
    try:
        return bool((json.loads(arguments) if isinstance(arguments, str) else arguments) == wanted)
    except ValueError:
        return False


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
