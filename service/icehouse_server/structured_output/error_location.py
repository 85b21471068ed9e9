"""Error location: where in a form a mistake is, from llguidance's message. Pure functions, any thread.

llguidance names line and column of a Lark grammar, but of a JSON schema only what is wrong; the
place is found by asking about ever smaller parts of it.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from icehouse_server.structured_output.schema.references import Mistake, References, UnusableSchema, escaped

_LARK_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX_CARET = re.compile(r"^( *)\^", re.MULTILINE)
_REGEX_ERROR = re.compile(r"^error: (.+)$", re.MULTILINE)
_DEFINITION = "\n  while processing "
_REGEX_INDENT = 4
"""Spaces that regex-syntax puts before the pattern it shows."""
_DETAIL_LENGTH_LIMIT = 240
_PROBE_BYTES = 1 << 20
"""Text that is compiled to find the faulty part; 1 MiB takes 2 s."""

_SHARED = frozenset({"$ref", "$defs", "definitions"})
"""Keywords that a part shares with others."""
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties")


def lark_mistake(message: str) -> Mistake:
    """Read llguidance's message about a Lark grammar."""
    found = _LARK_PLACE.match(message)
    if found is None:
        return Mistake(_one_line(message))
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
    """Return the mistake at the smallest part for which `complain` says the same as for the whole.

    Parts are asked about without what they refer to; a mistake that no part has by itself is the whole's.
    """
    message = _without_definition(message)
    byte_count = 0

    def has_it(part: Any) -> bool:
        nonlocal byte_count
        if byte_count > _PROBE_BYTES:
            return False
        try:
            probe = _without_references(part)
            byte_count += len(json.dumps(probe))
        except RecursionError:
            return False  # data nested deeper than Python's stack
        return _without_definition(complain(probe)) == message

    found = next((whole for whole in _wholes(schema) if has_it(whole[1])), None)
    place = ""
    while found is not None:
        place, part = found
        children = ((place + step, child) for step, child in _children(part))
        found = next((child for child in children if has_it(child[1])), None)
    return Mistake(_one_line(message), place or "/")


def _without_definition(message: str) -> str:
    """Return a message without the name of the definition that llguidance was at: the server made it up."""
    return message.partition(_DEFINITION)[0]


def _wholes(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield a schema and what it refers to, with their places."""
    references = References(schema)
    remaining, seen = collections.deque([("", schema)]), {""}
    while remaining:
        place, whole = remaining.popleft()
        yield place, whole
        for reference in _references(whole):
            with contextlib.suppress(UnusableSchema):
                target = references.target(reference, place)
                if target[0] not in seen:
                    seen.add(target[0])
                    remaining.append(target)


def _references(schema: Any) -> Iterator[str]:
    remaining = [schema]
    while remaining:
        part = remaining.pop()
        if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
            yield part["$ref"]
        remaining += [child for _, child in _children(part)]


def _without_references(schema: Any) -> Any:
    """Return a schema without its references, as if they allowed everything."""
    if isinstance(schema, list):
        return [_without_references(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _without_references(value) for key, value in schema.items() if key not in _SHARED}


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
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= _DETAIL_LENGTH_LIMIT else text[: _DETAIL_LENGTH_LIMIT - 1] + "…"
