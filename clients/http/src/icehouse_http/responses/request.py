"""Requests of responses, read into what the server is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from icehouse_client import Message, Options

from icehouse_http.chat.request import set_format
from icehouse_http.chat.turns import tool_options
from icehouse_http.errors import ApiError
from icehouse_http.exchange import Asked
from icehouse_http.field_names import FieldNames, Turn
from icehouse_http.fields import INT32_MAX, Fields
from icehouse_http.responses.functions import Functions, functions_of
from icehouse_http.responses.items import turns_of, with_instructions
from icehouse_http.responses.store import ResponseStore
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

_KEPT_ELSEWHERE = ("conversation", "prompt")
"""Fields that name a part of the input; without it the answer would be to something else."""
_NAMES = {
    "prompt.chat": "input",
    "prompt.tools": "tools",
    "prompt.adapter": "model",
    "max_reasoning_tokens": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "tool_choice": "tool_choice",
}
_SEALED_REASONING = "reasoning.encrypted_content"


@dataclasses.dataclass(frozen=True, slots=True)
class AskedResponse:
    """What a request asks for, and what its response repeats and keeps."""

    asked: Asked
    messages: tuple[Message, ...]
    """The conversation without its instructions."""
    functions: Functions
    is_stored: bool
    seals_reasoning: bool
    told: Mapping[str, Any]
    """Fields of the request that are fields of the response too."""


def asked_of(
    fields: Fields,
    target: Target,
    headers: Mapping[str, str],
    settings: Settings,
    *,
    store: ResponseStore,
    scope: str,
) -> AskedResponse:
    """Return what a request asks for; raises ApiError that names the field that cannot be read."""
    options: Options = sampling_of(fields, settings)
    options.update(target_options(target))
    options.update(form_options(settings))
    options.update(session_of(fields.text("prompt_cache_key"), headers))
    functions = functions_of(fields)
    options.update(tool_options(fields, list(functions.tools)))
    reasoning = fields.object("reasoning") or Fields({})
    options.update(effort_options(target, effort_of(reasoning, "effort")))
    options["max_output_tokens"] = fields.token_limit("max_output_tokens") or INT32_MAX
    text = fields.object("text") or Fields({})
    if (form := text.object("format")) is not None:
        set_format(options, form, "")
    for name in _KEPT_ELSEWHERE:
        if fields.raw(name) is not None:
            raise fields.refusal(name, "names something not stored here; send it with the request")
    turns = (*_earlier(fields, store, scope), *turns_of(fields, lambda name: store.item(scope, name)))
    if not turns:
        raise fields.refusal("input", "is required")
    sent = with_instructions(fields.text("instructions"), turns)
    names = FieldNames([turn.place for turn in sent], tools=functions.places, others=_NAMES)
    return AskedResponse(
        Asked([turn.message for turn in sent], options, fields.flag("stream"), names),
        tuple(turn.message for turn in turns),
        functions,
        is_stored=fields.flag("store", default=True),
        seals_reasoning=_SEALED_REASONING in fields.texts("include"),
        told={"model": target.model.id, **_told(fields)},
    )


def _earlier(fields: Fields, store: ResponseStore, scope: str) -> Sequence[Turn]:
    previous = fields.text("previous_response_id")
    if not previous:
        return ()
    messages = store.get(scope, previous)
    if messages is None:
        message = f"the response {previous[:80]!r} is not stored here; send the whole conversation"
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return [Turn(message, "previous_response_id") for message in messages]


def _told(fields: Fields) -> dict[str, Any]:
    return {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": fields.raw("max_output_tokens"),
        "metadata": fields.mapping("metadata") or {},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", default=True),
        "previous_response_id": fields.raw("previous_response_id"),
        "reasoning": fields.raw("reasoning"),
        "store": fields.flag("store", default=True),
        "temperature": fields.raw("temperature"),
        "text": fields.raw("text") or {"format": {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.items("tools"),
        "top_p": fields.raw("top_p"),
        "truncation": "disabled",
    }
