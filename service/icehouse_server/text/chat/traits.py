"""Traits of a chat template: what it supports, what it shows, and in which form."""

from __future__ import annotations

import dataclasses
import enum


class CallIds(enum.Enum):
    """Which ids of calls a template supports."""

    ANY = enum.auto()
    NINE_LETTERS = enum.auto()
    """Nine letters and digits, as Mistral's."""
    NAMED = enum.auto()
    """`functions.NAME:INDEX`, as Kimi's: the name is written only as a part of the id."""


class Arguments(enum.Enum):
    """In which form a template wants the arguments of a call."""

    VERBATIM = enum.auto()
    """JSON that it writes unchanged, so that arguments stay as the model wrote them."""
    OBJECT = enum.auto()
    TEXT = enum.auto()
    """JSON that it parses itself."""


class ToolForm(enum.Enum):
    """In which form a template wants a tool."""

    WRAPPED = enum.auto()
    """`{"type": "function", "function": …}` with the fields that the caller gave."""
    COMPLETE = enum.auto()
    """The same with every field that a template may ask for."""
    PLAIN = enum.auto()
    """The function alone, with every field."""


class ToolPosition(enum.Enum):
    """Where a template looks for the tools."""

    VARIABLE = enum.auto()
    BESIDE_SYSTEM = enum.auto()
    """In its variable, but it shows them only where a system's turn comes first."""
    IN_SYSTEM = enum.auto()
    """In the first turn, the system's, as a text."""


class EmptyContent(enum.Enum):
    """What content an assistant's turn without text has."""

    TEXT = enum.auto()
    """An empty text."""
    PARTS = enum.auto()
    """A list with an empty text."""
    NONE = enum.auto()
    """None beside calls, an empty text elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The result of rendering small histories; by default everything is supported.

    What a template does not take or show is written in another form, so that nothing is lost.
    """

    part_roles: frozenset[str] = frozenset()
    """Roles whose content is shown only as a list of parts."""
    wants_tool_list: bool = False
    """Without tools it needs an empty list of them, or it fails."""
    filler: str = ""
    """The text of empty turns; not empty where the template refuses those."""

    knows_developer: bool = False
    """It has a form of its own for "developer"; elsewhere the role becomes system."""
    takes_first_system: bool = True
    takes_later_system: bool = True
    takes_lone_system: bool = True
    """A system's turn with no other turn behind it."""
    takes_repeated_roles: bool = True
    """False where user and assistant must alternate."""
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
    """A call without a result before other turns."""
    takes_stray_results: bool = True
    """A result that does not follow the turn with its call."""
    takes_user_after_result: bool = True

    reasoning_key: str = "reasoning_content"
    """The key of a turn's reasoning; empty where reasoning is a part of the content."""
