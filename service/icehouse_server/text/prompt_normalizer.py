"""Prompt normaliser: takes out of a conversation what changes from turn to turn and means nothing to a model.

Agents put a line for their billing into the first system message, with a checksum (`cch=…`) that differs in
every request, and send tools, and the keys of their schemas, in the order of some hash table. Each of them
makes another prompt of the same words, and nothing of the cached one can be reused.

A gateway that renders the template itself sends tokens: the line is found there too, and what it leaves is
tokenized anew. Pure functions.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Sequence

from icehouse_server.domain.chat import ChatMessage, Conversation, PromptChange, PromptChangeKind, Tool

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

_SYSTEM_ROLES = ("system", "developer")
_HEAD_TOKEN_COUNT = 2048
"""Of a rendered prompt, where the first turn begins."""
_HEADER_LENGTH = 32
"""A role and what else stands between special tokens is shorter than this, a turn longer."""
_PAIR = r"[\w.\-]{1,64}=[^;\s]{0,256}"
_LINE = rf"(?P<line>(?:[\w.\-]{{1,64}}:[ \t]+)?(?P<pairs>(?:{_PAIR};[ \t]*)*(?:{_PAIR}[ \t]*$)?)(\n?))"
_PAIRS = re.compile(rf"^{_LINE}", re.MULTILINE)
"""The beginning of a line such as `x-anthropic-billing-header: cc_version=2.1; cch=0a1b;`, perhaps with the
next part of the message right behind it: parts are joined without a separator."""
_PAIRS_IN_TURN = re.compile(rf"^[ \t]*{_LINE}", re.MULTILINE)
"""In a rendered turn a template may have put a space before it."""
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


def normalized_tokens(
    token_ids: tuple[int, ...], *, encode: Encode, decode: Decode, added_token_ids: Collection[int]
) -> tuple[tuple[int, ...], tuple[PromptChange, ...]]:
    """Return a rendered prompt without the billing lines in its first turn, and what was changed.

    `encode` adds no special tokens and `decode` hides none; `added_token_ids` are cut out of a text before
    anything else, so that what lies between two of them can be tokenized by itself. The prompt stays as it is
    where its text without the line would not come out exactly so.
    """
    start, stop = _first_turn(token_ids, decode, added_token_ids)
    turn = decode(token_ids[start:stop])
    kept, count = _cut_billing_lines(turn, _PAIRS_IN_TURN)
    if not count:
        return token_ids, ()
    anew = (*token_ids[:start], *encode(kept), *token_ids[stop:])
    if not kept.strip() or decode(anew) != decode(token_ids[:start]) + kept + decode(token_ids[stop:]):
        return token_ids, ()
    return anew, (PromptChange(PromptChangeKind.BILLING_LINE_DROPPED, count),)


def _first_turn(
    token_ids: Sequence[int], decode: Decode, added_token_ids: Collection[int]
) -> tuple[int, int]:
    """Return where the first text between added tokens lies that is longer than a header; it may go on beyond
    the head, and is then taken to its end."""
    start = 0
    for index in (
        *(i for i, token_id in enumerate(token_ids) if token_id in added_token_ids),
        len(token_ids),
    ):
        if len(decode(token_ids[start:index])) > _HEADER_LENGTH:
            return start, index
        start = index + 1
        if start >= _HEAD_TOKEN_COUNT:
            break
    return 0, 0


def _cut_billing_lines(text: str, pairs: re.Pattern[str]) -> tuple[str, int]:
    """Return a text without such lines, and how many there were. With the rest of a line left, its end stays
    too."""
    kept: list[str] = []
    position = count = 0
    for found in pairs.finditer(text):
        if _CHECKSUM.search(found["pairs"]) is None:
            continue
        kept.append(text[position : found.start("line")])
        position = found.end()
        count += 1
    return "".join((*kept, text[position:])), count


def _without_billing_lines(messages: tuple[ChatMessage, ...]) -> tuple[tuple[ChatMessage, ...], int]:
    """Return the messages without such lines in the first system message, and how many there were.

    A message that was nothing else goes with them, unless it is the only one.
    """
    index = next((i for i, message in enumerate(messages) if message.role in _SYSTEM_ROLES), None)
    if index is None:
        return messages, 0
    message = messages[index]
    content, count = _cut_billing_lines(message.content, _PAIRS)
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
