"""Error location: where in a form a mistake is, from llguidance's message. Pure functions, any thread.

llguidance names line and column of a Lark grammar, but of a JSON schema only what is wrong; the
place is found by asking about ever smaller parts of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from icehouse_server.structured_output.schema.references import References, UnusableSchema, escaped

_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX_CARET = re.compile(r"^( *)\^", re.MULTILINE)
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_DEFINITION = "\n  while processing "
_REGEX_INDENT = 4
"""Spaces that regex-syntax puts before the pattern it shows."""
_DETAIL_LENGTH_LIMIT = 240
_PROBE_LIMIT = 500
"""Most parts of a schema to ask about; each takes some 0.1 ms."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_WORDING = {
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "use anyOf, or alternatives of which "
    "no two can match the same value"
}


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong and where: a JSON pointer, "line 2, column 5", or "" where it is not known."""

    detail: str
    place: str


def lark_mistake(message: str) -> Mistake:
    """Read llguidance's message about a Lark grammar."""
    found = _LARK_PLACE.match(message)
    if found is None:
        return Mistake(_one_line(message), "")
    # Behind the message it shows the source, which the caller has.
    detail = message[found.end() :].partition("\n")[0]
    regex_error = _REGEX_ERROR.search(message)
    if regex_error is not None:
        detail = f"{detail.partition(':')[0]}: {regex_error[1]}"
    return Mistake(_one_line(detail), f"line {found[1]}, column {found[2]}")


def regex_mistake(message: str) -> Mistake:
    """Read llguidance's message about a lone regular expression."""
    error = _REGEX_ERROR.search(message)
    if error is None:
        return Mistake(_one_line(_LARK_PLACE.sub("", message).partition("\n")[0]), "")
    caret = _REGEX_CARET.search(message)
    place = f"column {len(caret[1]) - _REGEX_INDENT + 1}" if caret is not None else ""
    return Mistake(error[1], place)


def schema_mistake(schema: Any, message: str, *, complain: Callable[[Any], str]) -> Mistake:
    """Return the JSON pointer of the smallest part of which `complain` says the same as of the whole."""
    shared = _definitions(schema)
    message = _without_definition(message)
    pointer, part, probe_count = "", schema, 0
    seen: set[str] = set()
    while pointer not in seen:
        seen.add(pointer)
        for child_pointer, child in _parts(schema, part, pointer):
            probe_count += 1
            if probe_count > _PROBE_LIMIT:
                break
            probe = {**shared, **child} if isinstance(child, Mapping) else child
            if _without_definition(complain(probe)) == message:
                pointer, part = child_pointer, child
                break
    return Mistake(_one_line(message), pointer or "/")


def _without_definition(message: str) -> str:
    """Return a message without the definition that llguidance was at, which is named by the server."""
    return message.partition(_DEFINITION)[0]


def _parts(root: Any, part: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield what a part is made of: its own subschemas, then what it refers to."""
    yield from ((pointer + step, child) for step, child in _children(part))
    if isinstance(part, Mapping) and "$ref" in part:
        with contextlib.suppress(UnusableSchema):
            yield References(root).target(part["$ref"], pointer)


def _definitions(schema: Any) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        return {}
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from ((f"/{key}/{escaped(name)}", child) for name, child in schema[key].items())
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"/{key}/{index}", child) for index, child in enumerate(schema[key]))
    for key in _SINGLES:
        if isinstance(schema.get(key), Mapping | bool):
            yield f"/{key}", schema[key]


def _one_line(message: str) -> str:
    for theirs, ours in _WORDING.items():
        message = message.replace(theirs, ours)
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= _DETAIL_LENGTH_LIMIT else text[: _DETAIL_LENGTH_LIMIT - 1] + "…"
