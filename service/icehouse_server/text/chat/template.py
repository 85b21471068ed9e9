"""Chat template of a model: turns and tools to text, and what it takes, found by trying it.

Runs in the rpc room's small executor, one caller at a time.

Turns made to fit a chat template: roles renamed, folded and merged as far as it needs. Pure.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from icehouse_server.domain.chat import ChatMessage, PlacedImage, Tool, ToolCall
from icehouse_server.errors import InvalidRequest, Reason

_REASONING_KEY = re.compile(r"""message(?:\.|\[['"]|\.get\(['"])(reasoning_content|reasoning|thinking)\b""")

# Words that no template contains, to be found again in what it writes.
_ASKED, _ANSWERED, _ORDERED, _RETURNED = "qzaskedqz", "qzansweredqz", "qzorderedqz", "qzreturnedqz"
_TOOL = Tool(name="qztoolqz", description="qzaboutqz", parameters={"type": "object", "properties": {}})
_CALL = ToolCall(id="qzcall000", name=_TOOL.name, arguments_json="{}")


class ChatTemplate:
    """`wrapper` is mlx-lm's TokenizerWrapper, whose `apply_chat_template` is used for its text only."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._traits: TemplateTraits | None = None
        self._reserved = _own_arguments(wrapper)

    @property
    def traits(self) -> TemplateTraits:
        """What the template takes; the first look renders a handful of tiny conversations."""
        if self._traits is None:
            self._traits = self._find_traits()
        return self._traits

    def text(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, Any] | None = None,
        adds_generation_prompt: bool = False,
        continues_final_message: bool = False,
    ) -> str:
        """Return what the template writes; raises InvalidRequest with its words when it refuses."""
        arguments = arguments or {}
        for name in sorted(arguments):
            if name in self._reserved:
                raise _invalid(
                    f"template_arguments has {name!r}, which the server sets itself; leave it out",
                    field="chat.template_arguments",
                    argument=name,
                )
        try:
            return self._render(
                messages,
                tools=tools,
                arguments=arguments,
                adds_generation_prompt=adds_generation_prompt,
                continues_final_message=continues_final_message,
            )
        except jinja2.TemplateError as error:
            raise _invalid(f"the model's chat template refused the conversation: {error.message}") from error
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            kind = type(error).__name__
            raise _invalid(
                f"the model's chat template failed with {kind}; it cannot render this conversation",
                error=kind,
            ) from error

    def _render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, Any] | None = None,
        adds_generation_prompt: bool = False,
        continues_final_message: bool = False,
        traits: TemplateTraits | None = None,
    ) -> str:
        traits = traits or self.traits
        key = traits.reasoning_key
        # A renderer written in Python may know fewer arguments: what is not asked for is not passed.
        extra: dict[str, Any] = dict(arguments or {})
        if tools:
            extra["tools"] = [offer(tool) for tool in tools]
        if continues_final_message:
            extra["continue_final_message"] = True if messages[-1].content else key
        rendered = self._wrapper.apply_chat_template(
            [_turn(message, traits) for message in messages],
            tokenize=False,
            add_generation_prompt=adds_generation_prompt,
            **extra,
        )
        return str(rendered)

    def _find_traits(self) -> TemplateTraits:
        user, assistant = ChatMessage("user", _ASKED), ChatMessage("assistant", _ANSWERED)
        system, later = ChatMessage("system", _ORDERED), ChatMessage("user", _RETURNED)
        calling = ChatMessage("assistant", "", tool_calls=(_CALL,))
        result = ChatMessage("tool", _RETURNED, name=_TOOL.name, tool_call_id=_CALL.id)
        source = self._source()
        tried = TemplateTraits()
        key = _REASONING_KEY.search(source)

        def shows(*messages: ChatMessage, words: Sequence[str], tools: Sequence[Tool] = ()) -> bool | None:
            """Tell whether all words come out; None when the template refuses."""
            try:
                text = self._render(messages, tools=tools, traits=tried)
            except Exception:  # as above; what it refuses here is refused in its own words when it is asked
                return None
            return all(word in text for word in words)

        if not shows(user, words=(_ASKED,)):
            tried = TemplateTraits(wants_parts=True)
            if not shows(user, words=(_ASKED,)):
                tried = TemplateTraits()
        developer = ChatMessage("developer", _ORDERED)
        knows_developer = "developer" in source or (
            not source and bool(shows(developer, user, words=(_ORDERED,)))
        )
        return TemplateTraits(
            knows_developer=knows_developer,
            takes_first_system=bool(shows(system, user, words=(_ORDERED, _ASKED))),
            takes_later_system=bool(shows(user, assistant, system, later, words=(_ORDERED, _RETURNED))),
            takes_repeated_roles=bool(shows(user, later, words=(_ASKED, _RETURNED))),
            shows_tools=shows(user, words=(_TOOL.name,), tools=(_TOOL,)) is not False,
            shows_tool_calls=shows(user, calling, words=(_TOOL.name,)) is not False,
            shows_tool_results=shows(user, calling, result, words=(_RETURNED,)) is not False,
            reasoning_key=key[1] if key else tried.reasoning_key,
            wants_parts=tried.wants_parts,
        )

    def _source(self) -> str:
        """Return the template's text, all of its variants together; empty for one written in Python."""
        found = getattr(self._wrapper, "chat_template", None)
        if isinstance(found, Mapping):
            return "\n".join(str(variant) for variant in found.values())
        return found if isinstance(found, str) else ""


def _turn(message: ChatMessage, traits: TemplateTraits) -> dict[str, Any]:
    has_parts = bool(message.images) or traits.wants_parts
    turn: dict[str, Any] = {
        "role": message.role,
        "content": _parts_of(message) if has_parts else message.content,
    }
    if message.name:
        turn["name"] = message.name
    if message.reasoning:
        turn[traits.reasoning_key] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments_json)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _parts_of(message: ChatMessage) -> list[dict[str, str]]:
    """Return text and images as templates of models that see want them."""
    parts: list[dict[str, str]] = []
    start = 0
    for position in (*(placed.position for placed in message.images), len(message.content)):
        if position > start:
            parts.append({"type": "text", "text": message.content[start:position]})
        parts.append({"type": "image"})
        start = position
    parts.pop()
    return parts or [{"type": "text", "text": ""}]


def offer(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates and parsers of calls want it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _own_arguments(wrapper: Any) -> frozenset[str]:
    """Return the names that mean something to the renderer itself."""
    names = {"messages", "conversation", "self", "args", "kwargs"}
    inner = getattr(wrapper, "_tokenizer", wrapper)
    for function in (inner.apply_chat_template, getattr(wrapper, "_chat_template", None)):
        if function is not None:
            names.update(inspect.signature(function).parameters)
    return frozenset(names)


def _invalid(message: str, *, field: str = "chat", **facts: object) -> InvalidRequest:
    return InvalidRequest(Reason.CHAT_INVALID, message, field=field, metadata=facts)


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
    wants_parts: bool = False
    """It shows nothing of a turn whose content is a text and no list of parts."""


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
            images=(*last.images, *_shifted(turn, behind=last.content)),
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
            content, images = _joined(waiting, turn.content), _shifted(turn, behind=waiting)
            folded.append(dataclasses.replace(turn, content=content, images=images))
            waiting = ""
        else:
            folded.append(turn)
    if waiting:
        folded.append(ChatMessage("user", waiting))
    return folded


def _shifted(turn: ChatMessage, *, behind: str) -> tuple[PlacedImage, ...]:
    """Return a turn's images where its text follows another one."""
    moved = len(_joined(behind, turn.content)) - len(turn.content)
    return tuple(dataclasses.replace(p, position=p.position + moved) for p in turn.images)


def _joined(first: str, second: str) -> str:
    return _GAP.join(text for text in (first, second) if text)
