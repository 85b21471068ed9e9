"""Traits of a chat template: what it takes, what it shows, and in which form it wants it."""

from __future__ import annotations

import dataclasses
import enum


class CallIds(enum.Enum):
    """What ids of calls a template takes."""

    ANY = enum.auto()
    NINE_LETTERS = enum.auto()
    """Nine letters and digits, as Mistral's."""
    NAMED = enum.auto()
    """`functions.NAME:INDEX`, as Kimi's: the id is all that is written of the name."""


class Arguments(enum.Enum):
    """What a template takes the arguments of a call as."""

    VERBATIM = enum.auto()
    """A text that it writes as it is, so that they come back as they were drawn."""
    OBJECT = enum.auto()
    TEXT = enum.auto()
    """A text that it reads itself."""


class ToolForm(enum.Enum):
    """What a template takes a tool as."""

    WRAPPED = enum.auto()
    """`{"type": "function", "function": …}`, with what the caller said and no more."""
    COMPLETE = enum.auto()
    """So too, with every field that a template may ask for."""
    PLAIN = enum.auto()
    """The function alone, with every field."""


class ToolPlace(enum.Enum):
    """Where a template looks for the tools."""

    VARIABLE = enum.auto()
    BESIDE_SYSTEM = enum.auto()
    """In its variable, but it shows them only where a system's turn comes first."""
    IN_SYSTEM = enum.auto()
    """In the first turn, the system's, as a text."""


class Silence(enum.Enum):
    """What the content of an assistant's turn is that says nothing."""

    TEXT = enum.auto()
    """An empty text."""
    PARTS = enum.auto()
    """A list with an empty text."""
    NONE = enum.auto()
    """No content, beside calls; an empty text elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What was found by rendering small histories; the defaults are those of a template that takes all.

    What a template does not take or does not show is written in another way, so nothing of it is lost.
    """

    part_roles: frozenset[str] = frozenset()
    """Roles whose content is shown only as a list of parts."""
    wants_tool_list: bool = False
    """It fails where no tool is offered, unless with an empty list."""
    spacer: str = ""
    """What a turn says that has nothing to say; not empty where the template refuses that."""

    knows_developer: bool = False
    """It writes "developer" in a way of its own; elsewhere the role is the system's."""
    takes_first_system: bool = True
    takes_later_system: bool = True
    takes_lone_system: bool = True
    """A system's turn that nobody follows."""
    takes_repeated_roles: bool = True
    """False where user and assistant must alternate."""
    takes_first_assistant: bool = True

    shows_tools: bool = True
    tool_form: ToolForm = ToolForm.WRAPPED
    tool_place: ToolPlace = ToolPlace.VARIABLE
    shows_tool_calls: bool = True
    """Elsewhere calls are text of the assistant."""
    shows_tool_results: bool = True
    """Elsewhere results are text of the user."""
    call_ids: CallIds = CallIds.ANY
    arguments: Arguments = Arguments.VERBATIM
    silence: Silence = Silence.TEXT
    takes_parallel_calls: bool = True
    takes_text_beside_calls: bool = True
    takes_open_calls: bool = True
    """A call that nobody has answered, before other turns."""
    takes_stray_results: bool = True
    """A result that does not follow the turn with its call."""
    takes_user_after_result: bool = True

    shows_reasoning: bool = True
    """It shows the reasoning of any turn; those of the past may go on purpose."""
    reasoning_key: str = "reasoning_content"
    """Where it looks for the reasoning of a turn; empty where that is a part of the content."""
