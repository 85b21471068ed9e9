"""Turns made to fit a chat template: roles renamed, folded and merged as far as it needs. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from service.domain.chat import ChatMessage

_GAP = "\n\n"
"""Between texts that were turns of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template takes, as found by trying it."""

    knows_developer: bool = True
    takes_first_system: bool = True
    takes_later_system: bool = True
    takes_repeated_roles: bool = True
    """False where user and assistant must alternate."""
    shows_tools: bool = True
    shows_tool_calls: bool = True
    shows_tool_results: bool = True
    reasoning_key: str = "reasoning_content"
    """The name under which it looks for the reasoning of a turn."""


def fit(messages: Sequence[ChatMessage], traits: TemplateTraits) -> list[ChatMessage]:
    """Return the turns as the template takes them."""
    turns = [_renamed(message, traits) for message in messages]
    turns = _fold_systems(_merge(turns, roles={"system"}), traits)
    if not traits.takes_repeated_roles:
        turns = _merge(turns, roles={"user", "assistant"})
    return turns


def _renamed(message: ChatMessage, traits: TemplateTraits) -> ChatMessage:
    if message.role == "developer" and not traits.knows_developer:
        return dataclasses.replace(message, role="system")
    return message


def _merge(turns: Sequence[ChatMessage], *, roles: set[str]) -> list[ChatMessage]:
    """Make one turn of those of one role in a row. A turn with calls is answered, so it ends its row."""
    merged: list[ChatMessage] = []
    for turn in turns:
        last = merged[-1] if merged else None
        if (
            last is None
            or turn.role not in roles
            or (last.role, last.name) != (turn.role, turn.name)
            or last.tool_calls
        ):
            merged.append(turn)
            continue
        merged[-1] = ChatMessage(
            role=turn.role,
            content=_joined(last.content, turn.content),
            name=turn.name,
            reasoning=_joined(last.reasoning, turn.reasoning),
            tool_calls=turn.tool_calls,
        )
    return merged


def _fold_systems(turns: Sequence[ChatMessage], traits: TemplateTraits) -> list[ChatMessage]:
    """Put the text of system turns that the template does not take before the next user's turn."""
    folded: list[ChatMessage] = []
    waiting = ""
    for index, turn in enumerate(turns):
        takes = traits.takes_first_system if index == 0 else traits.takes_later_system
        if turn.role == "system" and not takes:
            waiting = _joined(waiting, turn.content)
        elif turn.role == "user" and waiting:
            folded.append(dataclasses.replace(turn, content=_joined(waiting, turn.content)))
            waiting = ""
        else:
            folded.append(turn)
    if waiting:
        folded.append(ChatMessage("user", waiting))
    return folded


def _joined(first: str, second: str) -> str:
    return _GAP.join(text for text in (first, second) if text)
