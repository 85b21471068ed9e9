"""Next turn: how the prompt after a reply will begin, whatever the next message says. Pure functions.

A template may rewrite a reply and what came before it once the next message follows: it drops reasoning,
trims text, writes calls in its own way. So the conversation is rendered with the reply, and with a mark as
the next message. The next prompt begins with what comes before the mark.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from icehouse_server.domain.chat import ChatMessage, Conversation, ToolChoice

Decode = Callable[[Sequence[int]], str]

_MARK = "qznextturnqz"
_OTHER_RESULT = "0"
_LEAST_COUNT = 64
"""Fewer tokens are not computed ahead: they hardly lengthen the next turn's first pass."""
_FIRST_WINDOW = 32
"""Tokens at a prompt's end in which the mark is looked for first."""

_OPENING_COUNT, _END_LENGTH = 16, 2048
"""Messages, and characters at both ends of each, that identify a conversation: enough to tell them apart, and
little work for the event loop."""


def opening_of(conversation: Conversation) -> int:
    """Return a hash of how a conversation begins, up to the user's first message: the same for all of its
    turns within this process."""
    opening = []
    for message in conversation.messages[:_OPENING_COUNT]:
        text = message.content
        opening.append((message.role, len(text), text[:_END_LENGTH], text[-_END_LENGTH:]))
        if message.role == "user":
            break
    return hash(tuple(opening))


def with_next_turn(conversation: Conversation, reply: ChatMessage) -> Conversation:
    """Return the conversation with the reply and then the mark: as the user's next message, or as the first
    result of the reply's calls.

    The reply is assumed to come back as the caller sends earlier ones: with reasoning, or with tokens, only
    if an earlier reply has them.
    """
    earlier = [message for message in conversation.messages if message.role == "assistant"]
    reply = dataclasses.replace(
        reply,
        reasoning=reply.reasoning if any(message.reasoning for message in earlier) else "",
        token_ids=reply.token_ids if any(message.token_ids for message in earlier) else (),
    )
    following = [ChatMessage("user", _MARK)]
    if reply.tool_calls:
        following = [
            ChatMessage("tool", _OTHER_RESULT if index else _MARK, tool_call_id=call.id)
            for index, call in enumerate(reply.tool_calls)
        ]
    return dataclasses.replace(
        conversation,
        messages=(*conversation.messages, reply, *following),
        tool_choice=ToolChoice() if conversation.tool_choice.is_forced else conversation.tool_choice,
    )


def new_beginning(
    token_ids: tuple[int, ...], *, known: Sequence[int], decode: Decode, token_limit: int
) -> tuple[int, ...]:
    """Return a prompt's tokens before the mark and one more, which a warm-up does not keep; at most
    `token_limit` after those that are `known`. Empty if too few of them are new."""
    count = before_mark(token_ids, decode)
    both = zip(token_ids[:count], known, strict=False)
    common = next((i for i, (one, other) in enumerate(both) if one != other), min(count, len(known)))
    is_little = count - common < _LEAST_COUNT
    return () if is_little else token_ids[: min(count, common + token_limit) + 1]


def before_mark(token_ids: Sequence[int], decode: Decode) -> int:
    """Return how many tokens of a prompt come before the mark; 0 if it has none.

    Only tokens at the prompt's end are decoded.
    """

    def has_mark(width: int) -> bool:
        return _MARK in decode(token_ids[-width:])

    width = _FIRST_WINDOW
    while not has_mark(width):
        if width >= len(token_ids):
            return 0
        width *= 2
    widths = range(1, min(width, len(token_ids)) + 1)
    return len(token_ids) - widths[bisect.bisect_left(widths, True, key=has_mark)]
