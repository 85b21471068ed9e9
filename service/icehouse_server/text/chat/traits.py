"""Traits of a chat template: what it supports, what it shows, and in which form."""

from __future__ import annotations

import dataclasses
import enum


class CallIds(enum.Enum):
    """Which call ids a template supports."""

    ANY = enum.auto()
    NINE_LETTERS = enum.auto()
    """Nine letters and digits, as Mistral's."""
    NAMED = enum.auto()
    """`functions.NAME:INDEX`, as Kimi's: the template writes the name only as part of the id."""


class Arguments(enum.Enum):
    """The form in which a template wants a call's arguments."""

    VERBATIM = enum.auto()
    """JSON that it writes unchanged, so that arguments stay as the model wrote them."""
    OBJECT = enum.auto()
    TEXT = enum.auto()
    """JSON that it parses itself."""


class ToolForm(enum.Enum):
    """The form in which a template wants a tool."""

    WRAPPED = enum.auto()
    """`{"type": "function", "function": …}` with the fields that the caller gave."""
    COMPLETE = enum.auto()
    """The same, with every field that a template may read."""
    PLAIN = enum.auto()
    """The function alone, with every field."""


class ToolPosition(enum.Enum):
    """Where a template expects the tools."""

    VARIABLE = enum.auto()
    BESIDE_SYSTEM = enum.auto()
    """In its variable, but it shows them only if a system turn comes first."""
    IN_SYSTEM = enum.auto()
    """In the first turn, the system's, as text."""


class EmptyContent(enum.Enum):
    """The content of an assistant's turn without text."""

    TEXT = enum.auto()
    """An empty text."""
    PARTS = enum.auto()
    """A list of parts with one empty text."""
    NONE = enum.auto()
    """None if the turn has calls, else an empty text."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What rendering small histories has shown; by default everything is supported.

    Whatever a template does not take or show is written in another form, so that nothing is lost.
    """

    part_roles: frozenset[str] = frozenset()
    """Roles whose content is shown only as a list of parts."""
    wants_tool_list: bool = False
    """Whether it fails without tools unless it gets an empty list of them."""
    filler: str = ""
    """The text of empty turns; not empty if the template refuses those."""

    knows_developer: bool = False
    """Whether it writes "developer" in a form of its own; if not, the role becomes system."""
    takes_first_system: bool = True
    takes_later_system: bool = True
    takes_lone_system: bool = True
    """Whether it takes a system turn alone."""
    takes_repeated_roles: bool = True
    """False if user and assistant must alternate."""
    takes_first_assistant: bool = True

    shows_tools: bool = True
    tool_form: ToolForm = ToolForm.WRAPPED
    tool_position: ToolPosition = ToolPosition.VARIABLE
    shows_tool_calls: bool = True
    """If not, calls are written as text of the assistant."""
    shows_tool_results: bool = True
    """If not, results are written as text of the user."""
    call_ids: CallIds = CallIds.ANY
    arguments: Arguments = Arguments.VERBATIM
    empty_content: EmptyContent = EmptyContent.TEXT
    takes_parallel_calls: bool = True
    takes_text_beside_calls: bool = True
    takes_open_calls: bool = True
    """Whether other turns may follow a call that has no result."""
    takes_stray_results: bool = True
    """Whether a result may come elsewhere than after the turn with its call."""
    takes_user_after_result: bool = True

    reasoning_key: str = "reasoning_content"
    """The key of a turn's reasoning; empty if reasoning is part of the content."""
