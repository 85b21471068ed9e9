"""Chat template of a model: writes turns and tools as text. What it supports is found by probing it.

Runs in the small executor of `rpc`, one caller at a time.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from icehouse_server.domain.chat import ChatMessage, Tool, ToolCall
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.text.chat.history import fit
from icehouse_server.text.chat.probes import STEP_LIMIT, ShownTexts, TemplateTooLong, find_traits, skeleton_of
from icehouse_server.text.chat.traits import Arguments, EmptyContent, TemplateTraits, ToolForm, ToolPosition


class ChatTemplate:
    """`wrapper` is mlx-lm's TokenizerWrapper; only the text of its `apply_chat_template` is used."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._reserved = _own_arguments(wrapper)
        self._traits: dict[bool, TemplateTraits | None] = {}

    def traits(self, *, has_tools: bool) -> TemplateTraits:
        """Return what the template supports in conversations with tools on offer, or in those without.

        The first call renders dozens of tiny ones. Raises InvalidRequest if the template runs too long.
        """
        if has_tools not in self._traits:
            try:
                self._traits[has_tools] = find_traits(self._probe, has_tools=has_tools)
            except TemplateTooLong:
                self._traits[has_tools] = None
        traits = self._traits[has_tools]
        if traits is None:
            raise _invalid(
                f"the model's chat template runs through more than {STEP_LIMIT} lines for a few words; use "
                "another template"
            )
        return traits

    def _probe(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], traits: TemplateTraits) -> str:
        # Prompts end with the header of a reply, unless a reply comes last.
        is_answered = messages[-1].role == "assistant"
        return self._render(messages, tools=tools, traits=traits, adds_generation_prompt=not is_answered)

    def text(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, Any] | None = None,
        adds_generation_prompt: bool = False,
        continues_final_message: bool = False,
    ) -> str:
        """Return the text of turns that `fit` has prepared; raises InvalidRequest, with the template's own
        message, if it refuses them."""
        arguments = arguments or {}
        for name in sorted(arguments):
            if name in self._reserved:
                raise _invalid(
                    f"template_arguments has {name!r}, which the server sets itself; leave it out",
                    field="prompt.chat.template_arguments",
                    argument=name,
                )
        try:
            return self._render(
                messages,
                tools=tools,
                traits=self.traits(has_tools=bool(tools)),
                arguments=arguments,
                adds_generation_prompt=adds_generation_prompt,
                continues_final_message=continues_final_message,
            )
        except jinja2.TemplateError as error:
            raise _invalid(f"the model's chat template refused the conversation: {error.message}") from error
        except Exception as error:  # a template is a program of the model's author and may raise anything
            kind = type(error).__name__
            raise _invalid(
                f"the model's chat template failed with {kind}; it cannot render this conversation",
                error=kind,
            ) from error

    def check_shown(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool],
        arguments: Mapping[str, Any],
        adds_generation_prompt: bool,
    ) -> ShownTexts:
        """Raise InvalidRequest if the template would silently drop a text of this history.

        Reasoning does not count: templates drop that of past turns on purpose. Return where the template
        shows each message; empty if that is unknown.
        """
        skeleton, traits = skeleton_of(messages), self.traits(has_tools=bool(tools))
        try:
            text = self._render(
                fit(skeleton.messages, traits),
                tools=tools,
                traits=traits,
                arguments=arguments,
                adds_generation_prompt=adds_generation_prompt,
            )
        except Exception:  # as above; rendering the history itself reports the error
            return ShownTexts()
        lost = skeleton.lost_fields(text)
        if lost:
            field = f"prompt.chat.{lost[0]}"
            raise _invalid(
                f"the model's chat template would silently drop {field}; put it in a user message instead",
                field=field,
                lost_count=len(lost),
            )
        return skeleton.shown_texts(text)

    def _render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool],
        traits: TemplateTraits,
        arguments: Mapping[str, Any] | None = None,
        adds_generation_prompt: bool = False,
        continues_final_message: bool = False,
    ) -> str:
        # A renderer written in Python may accept fewer arguments, so only those that are needed are passed.
        extra: dict[str, Any] = dict(arguments or {})
        turns = [form_of(message, traits) for message in messages]
        offered = [offer(tool, traits.tool_form) for tool in tools]
        if offered and traits.tool_position is ToolPosition.IN_SYSTEM:
            turns[0]["tools"] = json.dumps(offered, ensure_ascii=False)
        elif offered or traits.wants_tool_list:
            extra["tools"] = offered
        if continues_final_message:
            extra["continue_final_message"] = bool(messages[-1].content) or traits.reasoning_key or True
        rendered = self._wrapper.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=adds_generation_prompt,
            **extra,
        )
        return str(rendered)


def _own_arguments(wrapper: Any) -> frozenset[str]:
    """Return the names of arguments that the renderer uses itself."""
    names = {"messages", "conversation", "self", "args", "kwargs"}
    inner = getattr(wrapper, "_tokenizer", wrapper)
    for function in (inner.apply_chat_template, getattr(wrapper, "_chat_template", None)):
        if function is not None:
            names.update(inspect.signature(function).parameters)
    return frozenset(names)


def _invalid(message: str, *, field: str = "prompt.chat", **facts: object) -> InvalidRequest:
    return InvalidRequest(Reason.CHAT_INVALID, message, field=field, metadata=facts)


_DEPTH_LIMIT = 16
"""Levels of nested schemas that get descriptions and types."""


def form_of(message: ChatMessage, traits: TemplateTraits) -> dict[str, Any]:
    """Return a turn in the form that the template reads."""
    form: dict[str, Any] = {"role": message.role, "content": _content_of(message, traits)}
    if message.name:
        form["name"] = message.name
    if message.reasoning and traits.reasoning_key:
        form[traits.reasoning_key] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments_of(call, traits.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        form["tool_call_id"] = message.tool_call_id
    return form


def offer(tool: Tool, form: ToolForm = ToolForm.WRAPPED) -> dict[str, Any]:
    """Return a tool in the form that templates and call parsers want."""
    is_whole = form is not ToolForm.WRAPPED
    function: dict[str, Any] = {"name": tool.name}
    if tool.description or is_whole:
        function["description"] = tool.description
    whole = {"type": "object", "properties": {}, "required": [], **tool.parameters}
    function["parameters"] = _described(whole) if is_whole else tool.parameters
    return function if form is ToolForm.PLAIN else {"type": "function", "function": function}


def _arguments_of(call: ToolCall, form: Arguments) -> str | dict[str, Any]:
    """Return a call's arguments; if they must be an object, any other text is wrapped in one."""
    text = call.arguments_json
    if form is Arguments.VERBATIM:
        return text
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    arguments = parsed if isinstance(parsed, dict) else {"arguments": text}
    return arguments if form is Arguments.OBJECT else json.dumps(arguments, ensure_ascii=False)


def _content_of(message: ChatMessage, traits: TemplateTraits) -> str | list[dict[str, str]] | None:
    if message.reasoning and not traits.reasoning_key:
        thought = {"type": "thinking", "thinking": message.reasoning}
        return [thought, *(_parts_of(message) if message.content else [])]
    empty_content = (
        traits.empty_content if message.role == "assistant" and not message.content else EmptyContent.TEXT
    )
    if message.images or message.role in traits.part_roles or empty_content is EmptyContent.PARTS:
        return _parts_of(message)
    return None if message.tool_calls and empty_content is EmptyContent.NONE else message.content


def _parts_of(message: ChatMessage) -> list[dict[str, str]]:
    """Return text and images as the parts that templates of vision models want."""
    parts: list[dict[str, str]] = []
    start = 0
    for position in (*(placed.position for placed in message.images), len(message.content)):
        if position > start:
            parts.append({"type": "text", "text": message.content[start:position]})
        parts.append({"type": "image"})
        start = position
    parts.pop()
    return parts or [{"type": "text", "text": ""}]


def _described(schema: Mapping[str, Any], *, depth: int = 0) -> dict[str, Any]:
    """Return the schema with a type and a description for every property, nested ones too."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or depth > _DEPTH_LIMIT:
        return dict(schema)
    described = {}
    for name, value in properties.items():
        field = value if isinstance(value, Mapping) else {}
        described[name] = {"type": _type_of(field), "description": "", **_described(field, depth=depth + 1)}
    return {**schema, "properties": described}


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return the first type among a schema's alternatives, for a schema without a type."""
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        name = choice.get("type") if isinstance(choice, Mapping) else None
        if isinstance(name, str) and name != "null":
            return name
    return "string"
