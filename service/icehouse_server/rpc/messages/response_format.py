"""Response format, from message to domain data. Pure functions; `GrammarCompilers` compiles it."""

from __future__ import annotations

from icehouse.v1 import response_format_pb2

from icehouse_server.domain.response_format import (
    Choice,
    JsonObject,
    JsonSchema,
    LarkGrammar,
    Regex,
    ResponseFormat,
)
from icehouse_server.errors import InvalidRequest, Reason
from icehouse_server.rpc.messages.validation import refuse_value

CHOICE_TEXT_LIMIT = 4096
"""Most texts of one choice."""

_FIELD = "response_format"


def response_format_of(proto: response_format_pb2.ResponseFormat) -> ResponseFormat:
    """Return the form that is asked for; raises InvalidRequest when none or an impossible one is."""
    kind = proto.WhichOneof("format")
    if proto.compact and kind not in ("json_schema", "json_object"):
        refuse_value(f"{_FIELD}.compact", True, "absent, except with json_schema or json_object")
    if kind == "json_schema":
        return JsonSchema(proto.json_schema, is_compact=proto.compact)
    if kind == "json_object":
        return JsonObject(is_compact=proto.compact)
    if kind == "regex":
        return Regex(proto.regex)
    if kind == "lark":
        return LarkGrammar(proto.lark)
    if kind == "choice" and proto.choice.texts:
        check_choice_count(len(proto.choice.texts), field=f"{_FIELD}.choice.texts")
        # A form is remembered as it is, and texts that are repeated add nothing to it.
        return Choice(tuple(dict.fromkeys(proto.choice.texts)))
    if kind == "choice":
        raise _missing(
            f"{_FIELD}.choice.texts is empty; give at least one text", field=f"{_FIELD}.choice.texts"
        )
    raise _missing(
        f"{_FIELD} is empty; set one of json_schema, json_object, regex, lark and choice, or leave it out",
        field=_FIELD,
    )


def check_choice_count(count: int, *, field: str) -> None:
    """Refuse more texts than one choice may have: each costs time and memory, the empty ones too."""
    if count > CHOICE_TEXT_LIMIT:
        refuse_value(field, count, f"at most {CHOICE_TEXT_LIMIT} texts", unit="texts")


def _missing(message: str, *, field: str) -> InvalidRequest:
    return InvalidRequest(Reason.RESPONSE_FORMAT_INVALID, message, field=field)
