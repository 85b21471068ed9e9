"""Requests of chat completions, read into what the server is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from icehouse_client import Options, formats

from icehouse_http.chat.turns import tool_options, tools_of, turns_of
from icehouse_http.exchange import Asked
from icehouse_http.field_names import FieldNames
from icehouse_http.fields import INT32_MAX, Fields
from icehouse_http.sampling import (
    effort_of,
    effort_options,
    form_options,
    openai_sampling_of,
    session_of,
    target_options,
)
from icehouse_http.settings import Settings
from icehouse_http.upstream import Target

_MOST_COMPLETIONS = 128
_MOST_TOP_LOGPROBS = 20
_TURN_FIELDS = {
    **{name: name for name in ("role", "content", "name", "tool_calls", "tool_call_id")},
    "parts": "content",
    "reasoning": "reasoning_content",
}
_NAMES = {
    "prompt.chat": "messages",
    "prompt.chat.template_arguments": "chat_template_kwargs",
    "prompt.tools": "tools",
    "prompt.adapter": "model",
    "completions": "n",
    "logprobs": "top_logprobs",
    "max_reasoning_tokens": "reasoning_effort",
    "response_format.json_schema": "response_format.json_schema.schema",
    "tool_choice": "tool_choice",
}


def asked_of(fields: Fields, target: Target, headers: Mapping[str, str], settings: Settings) -> Asked:
    """Return what a request asks for; raises ApiError that names the field that cannot be read."""
    options: Options = openai_sampling_of(fields, settings)
    options.update(target_options(target))
    options.update(form_options(settings))
    options.update(session_of(fields.text("prompt_cache_key"), headers))
    options.update(tool_options(fields, tools_of(fields)))
    effort, arguments = effort_of(fields, "reasoning_effort"), fields.mapping("chat_template_kwargs")
    options.update(effort_options(target, effort, template_arguments=arguments))
    limit = fields.token_limit("max_completion_tokens") or fields.token_limit("max_tokens")
    options["max_output_tokens"] = limit or INT32_MAX
    if (count := fields.integer("n", least=1, most=_MOST_COMPLETIONS)) is not None and count > 1:
        options["completions"] = count
    if fields.flag("logprobs"):
        options["logprobs"] = fields.integer("top_logprobs", least=0, most=_MOST_TOP_LOGPROBS) or 0
    if (form := fields.object("response_format")) is not None:
        set_format(options, form, "json_schema")
    turns = turns_of(fields)
    names = FieldNames(
        [turn.place for turn in turns],
        _TURN_FIELDS,
        tools=[f"tools[{index}].function" for index, _ in enumerate(options.get("tools", ()))],
        others=_NAMES,
    )
    return Asked([turn.message for turn in turns], options, fields.flag("stream"), names)


def set_format(options: Options, form: Fields, schema_field: str) -> None:
    """Set the form of the output. The schema is in the object `schema_field`; empty: beside the type."""
    match form.one_of("type", "text", "json_object", "json_schema", default="text"):
        case "json_object":
            options["response_format"] = formats.json_object()
        case "json_schema":
            holder = form.required_object(schema_field) if schema_field else form
            schema = holder.mapping("schema")
            if schema is None:
                raise holder.refusal("schema", "is required")
            options["response_format"] = formats.json_schema(schema)
