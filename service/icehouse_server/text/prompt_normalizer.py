"""Prompt normalizer: removes what varies between requests and means nothing to the model.

Agents put a billing line with a checksum (`cch=…`) that differs in every request into the first system
message, and send tools and the keys of their schemas in random order. Either changes the prompt near its
start, so the cached prefix cannot be reused.

A gateway that renders the template itself sends tokens. The line is removed from these too, and the text
around it is tokenized again. Pure functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence

from icehouse_server.domain.chat import ChatMessage, Conversation, PromptChange, PromptChangeKind, Tool

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

_SYSTEM_ROLES = ("system", "developer")
_MARK_LIMIT = 256
"""Added tokens of a rendered prompt that are looked at: enough for its system turn and tools."""
_HEADER_LENGTH = 32
"""Text between two special tokens is a header (a role and the like) up to this length, a turn beyond it."""
_USER_BEFORE = re.compile(r"user|human|inst", re.IGNORECASE)
_USER_AT_START = re.compile(r"\W*(?:user|human)\b", re.IGNORECASE)
"""How templates mark a user's turn: in the header before it, or in its first word if there is no header."""
_PAIR = r"[\w.\-]{1,64}=[^;\s]{0,256}"
_LINE = rf"(?P<line>(?:[\w.\-]{{1,64}}:[ \t]+)?(?P<pairs>(?:{_PAIR};[ \t]*)*(?:{_PAIR}[ \t]*$)?)(\n?))"
_PAIRS = re.compile(rf"^{_LINE}", re.MULTILINE)
"""The start of a line such as `x-anthropic-billing-header: cc_version=2.1; cch=0a1b;`. The next part of the
message may follow on the same line: parts are joined without a separator."""
_PAIRS_IN_TURN = re.compile(rf"^[ \t]*{_LINE}", re.MULTILINE)
"""The same in a rendered turn, where the template may have put a space before it."""
_CHECKSUM = re.compile(r"(?:^|;[ \t]*)cch=")


def normalized(conversation: Conversation) -> tuple[Conversation, tuple[PromptChange, ...]]:
    """Return the normalized conversation and what was changed; the conversation itself if nothing was.

    Replies and tool calls of earlier turns are not changed: they are what the model drew.
    """
    messages, line_count = _without_billing_lines(conversation.messages)
    tools = tuple(_with_sorted_keys(tool) for tool in conversation.tools)
    # Tools that were found later stay last, in their order: sorting them in would change more of the prompt.
    first = sorted((tool for tool in tools if not tool.is_found_later), key=lambda tool: tool.name)
    ordered = (*first, *(tool for tool in tools if tool.is_found_later))
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
    """Return a rendered prompt without the billing lines of its system turn, and what was changed.

    The line may be in any turn before the first user's: many templates put the tools in front.

    `encode` adds no special tokens and `decode` hides none. The tokenizer cuts `added_token_ids` out of a
    text first, so the text between two of them can be tokenized by itself. The prompt is not changed if the
    new tokens would not decode to exactly its text without the line.
    """
    cuts = (
        (start, stop, *_cut_billing_lines(turn, _PAIRS_IN_TURN))
        for start, stop, turn in _first_turns(token_ids, decode, added_token_ids)
    )
    match = next((cut for cut in cuts if cut[-1]), None)
    if match is None:
        return token_ids, ()
    start, stop, text, count = match
    anew = (*token_ids[:start], *encode(text), *token_ids[stop:])
    if not text.strip() or decode(anew) != decode(token_ids[:start]) + text + decode(token_ids[stop:]):
        return token_ids, ()
    return anew, (PromptChange(PromptChangeKind.BILLING_LINE_DROPPED, count),)


def _first_turns(
    token_ids: Sequence[int], decode: Decode, added_token_ids: Collection[int]
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, text) of the first turns: the texts between added tokens that are longer than a
    header. Yields the first turn, and if it is not a user's, all further turns before the first user's."""
    marks = (index for index, token_id in enumerate(token_ids) if token_id in added_token_ids)
    ends = list(itertools.islice(marks, _MARK_LIMIT))
    if len(ends) < _MARK_LIMIT:
        ends.append(len(token_ids))
    start = last_stop = 0
    is_first = True
    for stop in ends:
        text = decode(token_ids[start:stop])
        if len(text) > _HEADER_LENGTH:
            header = decode(token_ids[last_stop:start])
            is_user = bool(_USER_BEFORE.search(header) or _USER_AT_START.match(text))
            if is_first or not is_user:
                yield start, stop, text
            if is_user:
                return
            is_first, last_stop = False, stop
        start = stop + 1


def _cut_billing_lines(text: str, pairs: re.Pattern[str]) -> tuple[str, int]:
    """Return a text without billing lines, and how many there were. If other text is left on a line, its line
    break stays too."""
    parts: list[str] = []
    position = count = 0
    for match in pairs.finditer(text):
        if _CHECKSUM.search(match["pairs"]) is None:
            continue
        parts.append(text[position : match.start("line")])
        position = match.end()
        count += 1
    return "".join((*parts, text[position:])), count


def _without_billing_lines(messages: tuple[ChatMessage, ...]) -> tuple[tuple[ChatMessage, ...], int]:
    """Return the messages without billing lines in the first system message, and how many there were.

    A message that had nothing else is removed too, unless it is the only one.
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
    """Return the tool with the keys of its schema in alphabetical order; the tool itself if they already are.

    The JSON round trip handles any depth that the reader of the schema allowed.
    """
    text = json.dumps(tool.parameters, sort_keys=True)
    if text == json.dumps(tool.parameters):
        return tool
    return dataclasses.replace(tool, parameters=json.loads(text))


def _difference_count(tools: Sequence[Tool], others: Sequence[Tool]) -> int:
    return sum(tool is not other for tool, other in zip(tools, others, strict=True))
