"""Prompt normaliser: takes out of a conversation what changes from turn to turn and means nothing to a model.

Agents put a line for their billing into the first system message, with a checksum (`cch=…`) that differs in
every request, and send tools, and the keys of their schemas, in the order of some hash table. Each of them
makes another prompt of the same words, and nothing of the cached one can be reused. Pure functions.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from icehouse_server.domain.chat import ChatMessage, Conversation, PromptChange, PromptChangeKind, Tool

_SYSTEM_ROLES = ("system", "developer")
_PAIR = r"[\w.\-]{1,64}=[^;\s]{0,256}"
_PAIRS = re.compile(
    rf"^(?:[\w.\-]{{1,64}}:[ \t]+)?((?:{_PAIR};[ \t]*)*(?:{_PAIR}[ \t]*$)?)(\n?)", re.MULTILINE
)
"""The beginning of a line such as `x-anthropic-billing-header: cc_version=2.1; cch=0a1b;`, perhaps with the
next part of the message right behind it: parts are joined without a separator."""
_CHECKSUM = re.compile(r"(?:^|;[ \t]*)cch=")


def normalized(conversation: Conversation) -> tuple[Conversation, tuple[PromptChange, ...]]:
    """Return the conversation without what is volatile, and what was changed; the same one if nothing was.

    Replies and tool calls of earlier turns are left as they are: they are what the model drew.
    """
    messages, line_count = _without_billing_lines(conversation.messages)
    tools = tuple(_with_sorted_keys(tool) for tool in conversation.tools)
    ordered = tuple(sorted(tools, key=lambda tool: tool.name))
    counts = {
        PromptChangeKind.BILLING_LINE_DROPPED: line_count,
        PromptChangeKind.TOOL_KEYS_SORTED: _difference_count(tools, conversation.tools),
        PromptChangeKind.TOOLS_SORTED: _difference_count(ordered, tools),
    }
    changes = tuple(PromptChange(kind, count) for kind, count in counts.items() if count)
    if not changes:
        return conversation, ()
    return dataclasses.replace(conversation, messages=messages, tools=ordered), changes


def _without_billing_lines(messages: tuple[ChatMessage, ...]) -> tuple[tuple[ChatMessage, ...], int]:
    """Return the messages without such lines in the first system message, and how many there were.

    A message that was nothing else goes with them, unless it is the only one.
    """
    index = next((i for i, message in enumerate(messages) if message.role in _SYSTEM_ROLES), None)
    if index is None:
        return messages, 0
    message = messages[index]
    kept: list[str] = []
    position = count = 0
    for found in _PAIRS.finditer(message.content):
        if _CHECKSUM.search(found[1]) is None:
            continue
        # With the rest of the line left, its end stays too.
        kept.append(message.content[position : found.start()])
        position = found.end()
        count += 1
    content = "".join((*kept, message.content[position:]))
    if not count or (not content.strip() and len(messages) == 1):
        return messages, 0
    changed = (dataclasses.replace(message, content=content),) if content.strip() else ()
    return (*messages[:index], *changed, *messages[index + 1 :]), count


def _with_sorted_keys(tool: Tool) -> Tool:
    """Return the tool with the keys of its schema in alphabetical order, the same one where they are.

    JSON there and back goes as deep as whoever read the schema did.
    """
    text = json.dumps(tool.parameters, sort_keys=True)
    if text == json.dumps(tool.parameters):
        return tool
    return dataclasses.replace(tool, parameters=json.loads(text))


def _difference_count(tools: Sequence[Tool], others: Sequence[Tool]) -> int:
    return sum(tool is not other for tool, other in zip(tools, others, strict=True))
