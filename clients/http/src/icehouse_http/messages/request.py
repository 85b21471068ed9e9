"""Requests of messages, read into what the server is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from icehouse_client import Message, Options, PromptOptions

from icehouse_http.chat.request import set_format
from icehouse_http.exchange import Asked
from icehouse_http.field_names import FieldNames
from icehouse_http.fields import INT32_MAX, Fields
from icehouse_http.messages.turns import tool_options, tools_of, turns_of
from icehouse_http.sampling import (
    effort_of,
    effort_options,
    form_options,
    sampling_of,
    session_of,
    target_options,
)
from icehouse_http.settings import Settings
from icehouse_http.upstream import Target

_NAMES = {
    "prompt.chat": "messages",
    "prompt.tools": "tools",
    "prompt.adapter": "model",
    "stop": "stop_sequences",
    "max_reasoning_tokens": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format.schema",
    "tool_choice": "tool_choice",
}


def asked_of(fields: Fields, target: Target, headers: Mapping[str, str], settings: Settings) -> Asked:
    """Return what a request asks for; raises ApiError that names the field that cannot be read.

    A conversation that ends with the assistant's turn is continued there.
    """
    options: Options = sampling_of(fields, settings)
    options.update(target_options(target))
    options.update(form_options(settings))
    user = fields.object("metadata") or Fields({})
    options.update(session_of(user.text("user_id"), headers))
    offered = tools_of(fields)
    options.update(tool_options(fields, offered.tools))
    output = fields.object("output_config") or Fields({})
    options.update(effort_options(target, effort_of(output, "effort"), limit=_thinking_limit(fields)))
    options["max_output_tokens"] = fields.token_limit("max_tokens", least=0) or INT32_MAX
    if stop := fields.texts("stop_sequences"):
        options["stop"] = stop
    if (form := output.object("format") or fields.object("output_format")) is not None:
        set_format(options, form, "")
    turns = turns_of(fields)
    messages = [turn.message for turn in turns]
    options.update(_continuation_of(messages))
    names = FieldNames(
        [turn.place for turn in turns], tools=offered.places, schema="input_schema", others=_NAMES
    )
    return Asked(messages, options, fields.flag("stream"), names)


def prompt_options(asked: Asked, messages: Sequence[Message]) -> dict[str, Any]:
    """Return what decides the prompt of this beginning of a request's messages, or of all of them."""
    known = PromptOptions.__annotations__.keys() - {"continue_final_message"}
    options = {name: value for name, value in asked.options.items() if name in known}
    return {**options, **_continuation_of(messages)}


def _continuation_of(messages: Sequence[Message]) -> Options:
    return {"continue_final_message": True} if messages[-1].role == "assistant" else {}


def _thinking_limit(fields: Fields) -> int | None:
    """Return how many tokens the model may think with; None is as many as it likes."""
    thinking = fields.object("thinking")
    if thinking is None:
        return 0
    match thinking.one_of("type", "enabled", "disabled", "adaptive", default=""):
        case "enabled":
            return thinking.token_limit("budget_tokens")
        case "adaptive":
            return None
        case _:
            return 0
