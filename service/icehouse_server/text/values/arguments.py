"""Arguments of a call: what their text means under the schema of its tool, and whether they fit it.

Formats like XML write values without types. A text is read in every way that it can be, the strictest
first, and the first value that the schema takes is meant: null, true, a number, an object, a list, and last
the text itself, kept byte for byte. So a string stays a string where only strings fit, whatever it looks
like, and unions, lists of types, references, constants and enumerations need no rules of their own.

The check is JSON Schema, draft 2020-12, on the event loop, so its cost is bounded. The library's validator
counts what it does and gives up where a schema, or a text that a model wrote, would keep it for too long;
patterns are searched by an engine that has a time limit; references are looked up in the schema alone. A
keyword that is written wrongly constrains nothing, as if it were not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from referencing import Registry

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
"""Keywords that are looked at for one value; each takes some microseconds."""

_SEARCH_LIMIT_S = 0.02
"""For one search of one pattern."""
_MESSAGE_LENGTH_LIMIT = 200

Keyword = Callable[[Any, Any, Any, Any], Any]


class TooCostly(Exception):
    """A value that cannot be checked for what would be paid for it; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One argument as a format without types writes it."""

    name: str
    text: str
    is_text: bool | None = None
    """Whether it is a string, where the format says so."""


class ArgumentsSchema:
    """The schema of one tool's arguments. Made once for a request."""

    def __init__(self, parameters: Any) -> None:
        self._root = parameters if isinstance(parameters, Mapping) else {}
        self._validator = _Validator(dict(self._root), registry=Registry())
        self._properties: dict[str, Any] = {}

    def problem(self, value: Any, *, schema: Any = None) -> str:
        """Return what of a value does not fit, in words, "" for nothing; `schema` is a part of this one, and
        all of it when left out. Raises TooCostly."""
        _steps.count = 0
        validator = self._validator if schema is None else self._validator.evolve(schema=schema)
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            raise TooCostly("its arguments or their schema are nested too deep to be checked") from None
        return "" if error is None else _words(error)

    def read(self, argument: Argument, *, is_python: bool = False) -> ReadValue:
        """Return what the text of one argument means; the likeliest where nothing fits the schema.

        `is_python` where the family spells True, False and None. Raises TooCostly.
        """
        schema = self.of_property(argument.name)
        first: ReadValue | None = None
        for value in _readings(argument, is_python=is_python):
            first = first or value
            if schema in ({}, True) or not self.problem(strict(value.json_text), schema=schema):
                return value
        assert first is not None, "every text is a string"
        return first

    def has_argument(self, name: str) -> bool:
        """Whether an argument may have this name: the schema says something of it, or nothing of any."""
        return bool(name) and (not self._root.get("properties") or self.of_property(name) != {})

    def of_property(self, name: str) -> Any:
        """Return a schema for one argument; {} where nothing is said of it."""
        if name not in self._properties:
            self._properties[name] = _property_schema(self._root, name, self._resolve)
        return self._properties[name]

    def _resolve(self, reference: str) -> Any:
        """Return the part that a reference names; None where there is none."""
        try:
            return self._validator._resolver.lookup(reference).contents
        except Exception:  # a reference is whatever the caller wrote, and each kind fails in its own way
            return None


def as_object(members: Mapping[str, str]) -> str:
    """Return an object whose values are JSON already."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in members.items()) + "}"


def _readings(argument: Argument, *, is_python: bool) -> Iterator[ReadValue]:
    """Yield what a text may mean, the likeliest first."""
    text = argument.text
    bare = text.strip()
    if argument.is_text:
        yield ReadValue(quoted(text))
        return
    if _is_json(bare):
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


def _is_json(text: str) -> bool:
    try:
        strict(text)
    except ValueError:
        return False
    return True


def _words(error: ValidationError) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    message = error.message
    if len(message) > _MESSAGE_LENGTH_LIMIT:
        # A long message quotes the value or the schema; which keyword it was says as much.
        message = f"it does not fit the keyword {error.validator!r}"
    return f"argument {place}: {message}" if place else message


class _Steps(threading.local):
    """What the check that this thread makes has done."""

    count = 0

    def take(self, count: int) -> None:
        self.count += count
        if self.count > STEP_LIMIT:
            raise TooCostly(f"its arguments cannot be checked against the schema within {STEP_LIMIT} steps")


_steps = _Steps()


def _counted(
    keyword: Keyword, validator: Any, wanted: Any, value: Any, schema: Any
) -> Iterator[ValidationError]:
    _steps.take(1 + (len(wanted) if isinstance(wanted, list) else 0))
    try:
        yield from keyword(validator, wanted, value, schema) or ()
    except (TooCostly, RecursionError):
        raise
    except Exception:  # a schema is whatever the caller wrote: see above
        return


def _nullable(name: str) -> Keyword:
    """Return a keyword that takes null where OpenAPI's `nullable` says so."""
    keyword: Keyword = Draft202012Validator.VALIDATORS[name]

    def check(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
        if value is None and schema.get("nullable") is True:
            return ()
        return keyword(validator, wanted, value, schema)

    return check


def _pattern(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _finds(wanted, value):
        yield ValidationError(f"it does not match the pattern {wanted!r}")


def _pattern_properties(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    for pattern, child in wanted.items():
        for key, member in value.items():
            if _finds(pattern, key):
                yield from validator.descend(member, child, path=key, schema_path=pattern)


def _unique_items(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted is True and isinstance(value, list) and len({_spelled(item) for item in value}) < len(value):
        yield ValidationError("it has an item twice")


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _finds(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=_SEARCH_LIMIT_S) is not None
    except TimeoutError:
        raise TooCostly(f"searching for the pattern {pattern!r} takes too long") from None


_OWN: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique_items,
    "type": _nullable("type"),
    "enum": _nullable("enum"),
}
_Validator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {
        name: functools.partial(_counted, keyword)
        for name, keyword in {**Draft202012Validator.VALIDATORS, **_OWN}.items()
    },
)


def _property_schema(root: Any, name: str, resolve: Callable[[str], Any]) -> Any:
    """Return what the schema of an object says of one property, through references and unions."""
    visits = 0

    def said_in(schema: Any, depth: int) -> Any:
        nonlocal visits
        visits += 1
        if not isinstance(schema, Mapping) or depth > 16 or visits > 1000:
            return {}
        found = [_own_property(schema, name)]
        if isinstance(schema.get("$ref"), str):
            found.append(said_in(resolve(schema["$ref"]), depth + 1))
        found += [said_in(part, depth + 1) for part in _list(schema.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            options = [said_in(part, depth + 1) for part in _list(schema.get(keyword))]
            if options and {} not in options:
                found.append({"anyOf": options})
        said = [part for part in found if part != {}]
        return said[0] if len(said) == 1 else {"allOf": said} if said else {}

    return said_in(root, 0)


def _own_property(schema: Mapping[str, Any], name: str) -> Any:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    for pattern, child in patterns.items() if isinstance(patterns, Mapping) else ():
        # As for the keyword: a pattern that is written wrongly says nothing.
        with contextlib.suppress(Exception):
            if _finds(pattern, name):
                return child
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
