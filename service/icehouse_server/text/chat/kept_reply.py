"""Kept reply: an earlier turn that stays in a prompt as it was generated, and what follows it.

Templates rewrite the past: they drop reasoning, trim text and write calls in their own way. Here the prompt
that the turn answered and its own tokens are kept, and only what the template writes after the turn is added.
To find that, a mark replaces the turn's text, or its last call's arguments. Pure functions.
"""

from __future__ import annotations

import dataclasses
import re

from icehouse_server.domain.chat import Conversation

_MARK = "qzkeptreplyqz"
_TOOL_MARK = "qzkepttoolqz"
"""Appended to the first tool's description: it shows whether the template writes the tools after the turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeptReply:
    """An assistant's turn that was generated here."""

    index: int
    """The index of its message."""
    token_ids: tuple[int, ...]
    """The prompt that it answered, then its own tokens without the end token."""
    end_token_id: int | None = None
    """The token that ended it; None if none was drawn."""


def marked(conversation: Conversation, index: int) -> Conversation:
    """Return the conversation with the mark in the turn at `index`, and without drawn tokens up to there."""
    messages = [
        dataclasses.replace(message, token_ids=()) if number <= index else message
        for number, message in enumerate(conversation.messages)
    ]
    turn = dataclasses.replace(messages[index], reasoning="")
    if turn.tool_calls:
        *others, last = turn.tool_calls
        last = dataclasses.replace(last, arguments_json=f'{{"qzkeyqz": "{_MARK}"}}')
        messages[index] = dataclasses.replace(turn, tool_calls=(*others, last))
    else:
        messages[index] = dataclasses.replace(turn, content=_MARK)
    tools = conversation.tools
    if tools:
        shown = dataclasses.replace(tools[0], description=tools[0].description + _TOOL_MARK)
        tools = (shown, *tools[1:])
    return dataclasses.replace(conversation, messages=tuple(messages), tools=tools)


def behind_mark(text: str) -> str | None:
    """Return what follows the mark; None if the mark is not there exactly once, or tools follow it."""
    _, mark, behind = text.partition(_MARK)
    return None if not mark or _MARK in behind or _TOOL_MARK in behind else behind


@dataclasses.dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a template ends the marked turn."""

    closing: str
    """What it writes after the mark if no turn follows."""
    end: str
    """The token that ended the reply, as text; empty if none was drawn."""
    marks: re.Pattern[str]
    """Matches the special tokens between turns."""
    has_calls: bool

    def tail(self, behind: str) -> str | None:
        """Return the part of the text after the mark that follows the reply's tokens; None if uncertain.

        It begins with the token that ends the turn, or with the next turn if the template writes none.
        """
        start, end = self._mark_index(behind), self._mark_index(self.closing)
        if not behind.startswith(self.closing):
            # The template ends the very last turn differently (gpt-oss), or always adds a reply's header.
            is_same = start is not None and end is not None and behind[:start] == self.closing[:end]
            return behind[start:] if is_same else None
        if self.end and self.end in self.closing:
            return behind[self.closing.index(self.end) :]
        if end is not None:
            return behind[end:]
        # The header of the next turn ends this one; anything before the header is the end of a call.
        rest = behind[len(self.closing) :]
        is_next = not rest or self.marks.match(rest) is not None
        return rest if is_next and (self.has_calls or not self.closing.strip()) else None

    def _mark_index(self, text: str) -> int | None:
        match = self.marks.search(text)
        return None if match is None else match.start()
