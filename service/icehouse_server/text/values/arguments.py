"""Arguments of a call: what their text means under the tool's schema, and whether they fit it.

Formats like XML write values without types. Each possible reading of a text is tried, the strictest first,
and the first value that the schema allows is taken: null, true, a number, an object, a list, and last the
text itself, unchanged. So a string stays a string where only strings fit, and unions, lists of types,
references, constants and enumerations need no rules of their own.

The check is JSON Schema, draft 2020-12. It runs on the event loop, so its cost is bounded: steps are counted,
patterns have a time limit, and references are resolved only within the schema. An invalid keyword constrains
nothing, as if it were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import UnknownType
from jsonschema.validators import create
from referencing import Registry
from referencing.exceptions import Unresolvable

from icehouse_server.text.values.literals import (
    PYTHON_LITERALS,
    ReadValue,
    python_literal,
    quoted,
    strict,
    tolerant,
)
from icehouse_server.text.values.text_source import Malformed

STEP_LIMIT = 30_000
"""Most keywords that are evaluated for one value; each takes some microseconds."""

_MATCH_LIMIT_S = 0.02
"""For matching one pattern once."""
_MESSAGE_LENGTH_LIMIT = 200
_INVALID_SCHEMA = (
    *(TypeError, AttributeError, ValueError, ZeroDivisionError, OverflowError),
    *(re.error, regex.error, UnknownType, Unresolvable),
)
"""What evaluating an invalid keyword or resolving an invalid reference may raise."""

Keyword = Callable[[Any, Any, Any, Any], Any]


class ValueTooCostly(Exception):
    """A value that cannot be checked within the limits; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a format without types."""

    name: str
    text: str
    is_text: bool | None = None
    """Whether it is a string; None if the format does not say."""


class ArgumentsSchema:
    """The schema of one tool's arguments. Made once for a request."""

    def __init__(self, parameters: Any) -> None:
        schema = dict(parameters) if isinstance(parameters, Mapping) else {}
        if not isinstance(schema.get("$id"), str):
            schema.pop("$id", None)
        self._root = schema
        self._validator = _Validator(schema, registry=Registry())
        self._properties: dict[str, Any] = {}

    def problem(self, value: Any, *, schema: Any = None) -> str:
        """Return why a value does not fit, "" if it does. `schema` is a part of this schema; left out, all of
        it. Raises TooCostly."""
        _steps.count = 0
        validator = self._validator if schema is None else self._validator.evolve(schema=schema)
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            raise ValueTooCostly("its arguments or their schema are nested too deeply to check") from None
        return "" if error is None else _description(error)

    def read(self, argument: Argument, *, is_python: bool = False) -> ReadValue:
        """Return what the text of one argument means; the likeliest reading if none fits the schema.

        `is_python` if the family spells True, False and None. Raises TooCostly.
        """
        schema = self.of_property(argument.name)
        readings = list(_readings(argument, is_python=is_python))
        if schema in ({}, True):
            return readings[0]
        fitting = (each for each in readings if not self.problem(strict(each.json_text), schema=schema))
        return next(fitting, readings[0])

    def has_argument(self, name: str) -> bool:
        """Whether an argument may have this name: the schema describes it, or describes none."""
        return bool(name) and (not self._root.get("properties") or self.of_property(name) != {})

    def of_property(self, name: str) -> Any:
        """Return the schema of one argument; {} if this schema does not describe it."""
        if name not in self._properties:
            self._properties[name] = _property_schema(self._root, name, self._resolve)
        return self._properties[name]

    def _resolve(self, reference: str) -> Any:
        """Return the part of the schema that a reference names; None if there is none."""
        try:
            return self._validator._resolver.lookup(reference).contents
        except _INVALID_SCHEMA:
            return None


def _readings(argument: Argument, *, is_python: bool) -> Iterator[ReadValue]:
    """Yield what a text may mean, the likeliest first."""
    text = argument.text
    bare = text.strip()
    if argument.is_text:
        yield ReadValue(quoted(text))
        return
    with contextlib.suppress(ValueError):
        strict(bare)
        yield ReadValue(bare)
    if is_python and bare in PYTHON_LITERALS:
        yield ReadValue(PYTHON_LITERALS[bare])
    if argument.is_text is None:
        yield ReadValue(quoted(text))
    with contextlib.suppress(Malformed):
        yield tolerant(bare, is_python=is_python)
    if is_python:
        with contextlib.suppress(Malformed):
            yield python_literal(bare)
    if bare != text or argument.is_text is False:
        yield ReadValue(quoted(bare), is_repaired=True)


def _description(error: ValidationError) -> str:
    path = ".".join(str(part) for part in error.absolute_path)
    message = error.message
    if len(message) > _MESSAGE_LENGTH_LIMIT:
        # A long message quotes the value or the schema; the keyword's name is enough.
        message = f"it does not satisfy the keyword {error.validator!r}"
    return f"argument {path}: {message}" if path else message


class _Steps(threading.local):
    """Steps of the check that this thread is making."""

    count = 0

    def take(self, count: int) -> None:
        self.count += count
        if self.count > STEP_LIMIT:
            raise ValueTooCostly(
                f"its arguments cannot be checked against the schema within {STEP_LIMIT} steps"
            )


_steps = _Steps()


def _counted(
    keyword: Keyword, validator: Any, wanted: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    _steps.take(1 + (len(wanted) if isinstance(wanted, list) else 0))
    try:
        yield from keyword(validator, wanted, value, schema) or ()
    except _INVALID_SCHEMA:
        return


def _nullable(name: str) -> Keyword:
    """Return a keyword that also allows null if OpenAPI's `nullable` says so."""
    keyword: Keyword = Draft202012Validator.VALIDATORS[name]

    def check(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
        if value is None and schema.get("nullable") is True:
            return ()
        return keyword(validator, wanted, value, schema)

    return check


def _pattern(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _matches(wanted, value):
        yield ValidationError(f"it does not match the pattern {wanted!r}")


def _pattern_properties(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    for pattern, child in wanted.items():
        for key, member in value.items():
            if _matches(pattern, key):
                yield from validator.descend(member, child, path=key, schema_path=pattern)


def _unique_items(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted is True and isinstance(value, list):
        texts = {json.dumps(item, sort_keys=True) for item in value}
        if len(texts) < len(value):
            yield ValidationError("it has an item twice")


def _matches(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=_MATCH_LIMIT_S) is not None
    except TimeoutError:
        raise ValueTooCostly(f"searching for the pattern {pattern!r} takes too long") from None


_LATE_KEYWORDS = frozenset({"additionalProperties", "unevaluatedItems", "unevaluatedProperties"})
"""jsonschema matches `patternProperties` for these without a time limit, so they are evaluated after it."""


def _in_order(schema: Any) -> Any:
    return sorted(schema.items(), key=lambda item: item[0] in _LATE_KEYWORDS)


_KEYWORDS: dict[str, Keyword] = {
    **Draft202012Validator.VALIDATORS,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique_items,
    "type": _nullable("type"),
    "enum": _nullable("enum"),
}
_Validator: Any = create(
    Draft202012Validator.META_SCHEMA,
    {name: functools.partial(_counted, keyword) for name, keyword in _KEYWORDS.items()},
    type_checker=Draft202012Validator.TYPE_CHECKER,
    applicable_validators=_in_order,
)


def _property_schema(root: Any, name: str, resolve: Callable[[str], Any]) -> Any:
    """Return what an object's schema says about one property, including references and unions."""
    visit_count = 0

    def described_in(schema: Any, depth: int) -> Any:
        nonlocal visit_count
        visit_count += 1
        if not isinstance(schema, Mapping) or depth > 16 or visit_count > 1000:
            return {}
        parts = [_own_property(schema, name)]
        if isinstance(schema.get("$ref"), str):
            parts.append(described_in(resolve(schema["$ref"]), depth + 1))
        parts += [described_in(part, depth + 1) for part in _list(schema.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            options = [described_in(part, depth + 1) for part in _list(schema.get(keyword))]
            if options and {} not in options:
                parts.append({"anyOf": options})
        parts = [part for part in parts if part != {}]
        return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {}

    return described_in(root, 0)


def _own_property(schema: Mapping[str, Any], name: str) -> Any:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    for pattern, child in patterns.items() if isinstance(patterns, Mapping) else ():
        # An invalid pattern constrains nothing, and the check itself refuses a costly one.
        with contextlib.suppress(regex.error, ValueTooCostly):
            if _matches(pattern, name):
                return child
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
