"""Probes of a chat template: small histories that are rendered to learn what it supports and shows.

A trait is accepted if every history's words appear in the output. If no form of a history works, the trait
says that it is supported, so that a request gets the template's own error message. A template is a program of
the model's author and may never end, so its steps are counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from icehouse_server.domain.chat import ChatMessage, Tool, ToolCall
from icehouse_server.text.chat.history import fit
from icehouse_server.text.chat.traits import (
    Arguments,
    CallIds,
    EmptyContent,
    TemplateTraits,
    ToolForm,
    ToolPosition,
)

Render = Callable[[Sequence[ChatMessage], Sequence[Tool], TemplateTraits], str]
"""Renders turns that `fit` has prepared, with tools on offer; may raise anything."""

STEP_LIMIT = 200_000
"""Lines that a template may run for a history of a few turns; the longest known ones take 2,000."""
_TEMPLATE_FILE = "<template>"
"""The file name that Jinja gives to the code it compiles from a template."""
_ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "?": "qzrole"}
_CALL_COUNTS = {"c": 1, "b": 1, "p": 2}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan", "")
_WORD = re.compile(r"qz\d+qz")
_THOUGHT = "qzthoughtqz"
_BARE_TOOL = Tool("qztoolqz", "", {"properties": {"qzfieldqz": {"anyOf": [{"type": "string"}]}}})
_TOOL = Tool("qztoolqz", "qzaboutqz", {"type": "object", "properties": {}})
_USER = frozenset({"user"})
_REWRITTEN = ("'type': 'text'", '"type": "text"', "'type': 'thinking'", '"type": "thinking"')
"""What the output contains if a template prints a list of parts as if it were text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Skeleton:
    """A history whose texts are replaced by marker words that no template contains."""

    messages: tuple[ChatMessage, ...]
    fields: Mapping[str, str]
    """The field of the history that a marker word stands for."""
    message_indices: Mapping[str, int]
    """The index of the message that a marker word belongs to."""

    def lost_fields(self, text: str) -> list[str]:
        """Return the fields whose words are missing from a text."""
        shown = set(_WORD.findall(text))
        return [field for word, field in self.fields.items() if word not in shown]

    def shown_texts(self, text: str) -> ShownTexts:
        """Return where a text has marker words, and of which messages."""
        words = ((match.start(), self.message_indices.get(match.group())) for match in _WORD.finditer(text))
        return ShownTexts(text, tuple((start, index) for start, index in words if index is not None))


@dataclasses.dataclass(frozen=True, slots=True)
class ShownTexts:
    """What a template makes of a skeleton."""

    text: str = ""
    words: tuple[tuple[int, int], ...] = ()
    """Where each marker word begins, and the message that it belongs to; empty if that is unknown."""

    @property
    def order(self) -> list[int]:
        """The message of each word, in the order of the text."""
        return [index for _, index in self.words]


def skeleton_of(messages: Sequence[ChatMessage]) -> Skeleton:
    """Return the skeleton of a history; empty texts stay empty."""
    fields: dict[str, str] = {}
    message_indices: dict[str, int] = {}

    def word(index: int, field: str) -> str:
        made, sent_index = f"qz{len(fields)}qz", messages[index].sent_index
        fields[made] = f"messages[{index if sent_index is None else sent_index}].{field}"
        message_indices[made] = index
        return made

    def skeleton(index: int, message: ChatMessage) -> ChatMessage:
        return dataclasses.replace(
            message,
            content=word(index, "content") if message.content else "",
            images=tuple(dataclasses.replace(placed, position=0) for placed in message.images),
            reasoning="qz" if message.reasoning else "",
            tool_calls=tuple(
                ToolCall(
                    call.id,
                    word(index, f"tool_calls[{number}].name"),
                    # The extra space shows whether the template copies the text or serializes it again.
                    f'{{"qzkey":  "{word(index, f"tool_calls[{number}].arguments_json")}"}}',
                )
                for number, call in enumerate(message.tool_calls)
            ),
            name="qzname" if message.name else message.name,
            token_ids=(),
        )

    return Skeleton(tuple(itertools.starmap(skeleton, enumerate(messages))), fields, message_indices)


def find_traits(render: Render, *, has_tools: bool) -> TemplateTraits:
    """Return what the template supports in conversations with tools on offer, or in those without.

    A model may have a template for each. Raises TemplateTooLong if a template runs too long.
    """
    probes = _Probes(render, [_TOOL] if has_tools else [])
    # Each method builds on the traits that those before it have set.
    probes.find_form()
    probes.find_tools()
    if has_tools and not probes.traits.shows_tools:
        # Requests with tools will be refused; how the template writes past calls is found without tools.
        return dataclasses.replace(find_traits(render, has_tools=False), shows_tools=False)
    probes.find_roles()
    probes.find_calls()
    probes.find_positions()
    probes.find_systems()
    probes.find_reasoning()
    return probes.traits


class _Probes:
    def __init__(self, render: Render, tools: Sequence[Tool]) -> None:
        self._render = render
        self._tools = tools
        self.traits = TemplateTraits()

    def find_form(self) -> None:
        self._choose("u", "ua", wants_tool_list=(False, True))
        self._choose("u", part_roles=(frozenset(), _USER))
        if self.traits.part_roles:
            speakers = _USER | {"assistant"}
            self._choose("u", "ua", "su", part_roles=(_USER, speakers, speakers | {"system"}))

    def find_tools(self) -> None:
        asked = [ChatMessage("user", "qzaskedqz")]
        for location, form in itertools.product(ToolPosition, ToolForm):
            traits = dataclasses.replace(self.traits, tool_position=location, tool_form=form)
            text = self._text(asked, traits, tools=[_BARE_TOOL])
            if text is not None and _BARE_TOOL.name in text and "qzaskedqz" in text:
                # Without tools no system turn is needed.
                location = location if self._tools else self.traits.tool_position
                self.traits = dataclasses.replace(traits, tool_position=location)
                return
        self.traits = dataclasses.replace(self.traits, shows_tools=False)

    def find_roles(self) -> None:
        self._choose("uua", "uaau", "uuaau", takes_repeated_roles=(True, False))
        self._choose("e", "eau", filler=("", "..."))

    def find_calls(self) -> None:
        """Find the form in which calls and results are shown; if there is none, they are written as text."""
        self._choose(
            "uc",
            shows_tool_calls=(True, False),
            call_ids=tuple(CallIds),
            empty_content=tuple(EmptyContent),
            arguments=tuple(Arguments),
        )
        loops = ("uc", "ucr", "ucra", "ucrcrau")
        self._choose(
            *loops,
            shows_tool_calls=dict.fromkeys((self.traits.shows_tool_calls, False)),
            shows_tool_results=(True, False),
            call_ids=dict.fromkeys((self.traits.call_ids, *CallIds)),
        )
        if not self.traits.shows_tool_results:
            of_parts = self.traits.part_roles | {"tool"}
            shown = dataclasses.replace(self.traits, shows_tool_results=True, part_roles=of_parts)
            if all(self._passes(history, shown) for history in loops):
                self.traits = shown
        self._choose("upr", "uprra", "uprrprra", "uprrcra", takes_parallel_calls=(True, False))
        self._choose("ub", "ubr", "ubrbra", "ubrau", takes_text_beside_calls=(True, False))

    def find_positions(self) -> None:
        """Find the positions that turns of assistants, calls and results may have."""
        self._choose("au", "a", "aua", "cru", takes_first_assistant=(True, False))
        self._choose("ucru", "ucrua", takes_user_after_result=(True, False))
        self._choose("ucua", "ucuau", takes_open_calls=(True, False))
        self._choose("uo", "ou", "ucro", "ucrt", "uaou", takes_stray_results=(True, False))

    def find_systems(self) -> None:
        self._choose("du", "sdu", "uadu", knows_developer=(self._has_own_developer(), False))
        self._choose("su", "suau", "sua", "sucr", "sucrau", takes_first_system=(True, False))
        self._choose("uasu", "uas", "susu", "usau", "ucrsau", takes_later_system=(True, False))
        self._choose("s", takes_lone_system=(True, False))

    def find_reasoning(self) -> None:
        key = max(_REASONING_KEYS, key=self._thought_count)
        self.traits = dataclasses.replace(self.traits, reasoning_key=key)

    def _choose(self, *histories: str, **choices: Iterable[Any]) -> None:
        """Take the choices with which most histories are shown; of equally good ones the first."""
        best, best_count = self.traits, -1
        for values in itertools.product(*choices.values()):
            traits = dataclasses.replace(self.traits, **dict(zip(choices, values, strict=True)))
            count = sum(self._passes(history, traits) for history in histories)
            if count > best_count:
                best, best_count = traits, count
            if count == len(histories):
                break
        self.traits = best

    def _passes(self, history: str, traits: TemplateTraits) -> bool:
        skeleton = _skeleton(history)
        text = self._text(skeleton.messages, traits)
        if text is None or ("r" not in history and _is_rewritten(text)):
            return False
        calls = [call for message in skeleton.messages for call in message.tool_calls]
        if traits.arguments is Arguments.VERBATIM and not all(call.arguments_json in text for call in calls):
            return False
        # Within a tool loop a template need not show the tools again.
        shows_tools = self._tools and self.traits.shows_tools and not calls
        return not skeleton.lost_fields(text) and (not shows_tools or _TOOL.name in text)

    def _has_own_developer(self) -> bool:
        """Whether a developer turn is written differently from a system turn and from an unknown role's."""
        traits = dataclasses.replace(self.traits, knows_developer=True)
        own, *others = (
            (self._text(_skeleton(f"{role}u").messages, traits) or "").lower().replace(_ROLES[role], "")
            for role in ("d", "s", "?")
        )
        return bool(own) and own not in others

    def _thought_count(self, key: str) -> int:
        """Return how many histories show the reasoning that is given under this key."""
        traits = dataclasses.replace(self.traits, reasoning_key=key)
        texts = [self._text(_with_reasoning(history), traits) for history in ("ua", "uau", "ucr", "uc")]
        return sum(text is not None and _THOUGHT in text and not _is_rewritten(text) for text in texts)

    def _text(
        self, messages: Sequence[ChatMessage], traits: TemplateTraits, *, tools: Sequence[Tool] | None = None
    ) -> str | None:
        """Return what the template writes; None if it refuses."""
        try:
            with step_limit():
                return self._render(fit(messages, traits), self._tools if tools is None else tools, traits)
        except TemplateTooLong:
            raise
        except Exception:  # a template is a program of the model's author and may raise anything
            return None


def _is_rewritten(text: str) -> bool:
    return any(written in text for written in _REWRITTEN)


def _with_reasoning(history: str) -> list[ChatMessage]:
    return [
        dataclasses.replace(message, reasoning=_THOUGHT) if message.role == "assistant" else message
        for message in _skeleton(history).messages
    ]


@functools.cache
def _skeleton(history: str) -> Skeleton:
    """Return the skeleton of a history, given as one letter for each turn.

    s, d, u, a: system, developer, user, assistant. e: an empty user turn. c, p, b: a call, two at once, one
    with text. r, t, o: a result, the same again, one without a call.
    """
    messages: list[ChatMessage] = []
    open_ids: list[str] = []
    for index, letter in enumerate(history):
        if letter in _CALL_COUNTS:
            # Some templates do not take ids as long as this; others look for the tool's name in the id.
            open_ids = [f"call_qz{index}_{i}_0123456789" for i in range(_CALL_COUNTS[letter])]
            calls = tuple(ToolCall(id, "a", json.dumps({})) for id in open_ids)
            messages.append(ChatMessage("assistant", "a" if letter == "b" else "", tool_calls=calls))
        elif letter == "r":
            messages.append(ChatMessage("tool", "a", tool_call_id=open_ids.pop(0)))
        elif letter == "t":
            messages.append(messages[-1])
        elif letter == "e":
            messages.append(ChatMessage("user", ""))
        elif letter == "o":
            messages.append(ChatMessage("tool", "a", tool_call_id="call_qzlost"))
        else:
            messages.append(ChatMessage(_ROLES[letter], "a"))
    return skeleton_of(messages)


class TemplateTooLong(Exception):
    """A template ran for more lines than any should."""


@contextlib.contextmanager
def step_limit(line_count: int = STEP_LIMIT) -> Iterator[None]:
    """Raise TemplateTooLong from within a Jinja template that runs more lines than this, on this thread."""
    left = line_count

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != _TEMPLATE_FILE:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise TemplateTooLong(f"more than {line_count} lines")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
