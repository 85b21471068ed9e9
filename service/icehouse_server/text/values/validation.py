"""Validation of arguments by JSON Schema, draft 2020-12, at a bounded cost: on the event loop.

The library's validator does the work. It counts what it does and gives up where a schema, or a text that a
model wrote, would keep it for too long; patterns are searched by an engine that has a time limit; what a
reference names is looked for in the schema alone. A keyword that is written wrongly constrains nothing, as
if it were not there.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from referencing import Registry

STEP_LIMIT = 30_000
"""Keywords that are looked at for one value; each takes some microseconds."""

_SEARCH_LIMIT_S = 0.02
"""For one search of one pattern."""
_MESSAGE_LENGTH_LIMIT = 200

Keyword = Callable[[Any, Any, Any, Any], Any]


class TooCostly(Exception):
    """A value that cannot be checked for what would be paid for it; the message says why."""


class ArgumentsCheck:
    """Says whether a value fits a schema of `root`, in which its references are looked up."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._validator = _Validator(dict(root), registry=Registry())

    def problem(self, value: Any, *, schema: Any = None) -> str:
        """Return what of the value does not fit, in words, "" for nothing; `schema` is the root itself when
        left out. Raises TooCostly."""
        _steps.count = 0
        validator = self._validator if schema is None else self._validator.evolve(schema=schema)
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            raise TooCostly("its arguments or their schema are nested too deep to be checked") from None
        return "" if error is None else _words(error)

    def resolve(self, reference: str) -> Any:
        """Return the schema that a reference inside the root names; None where there is none."""
        try:
            return self._validator._resolver.lookup(reference).contents
        except Exception:  # a reference is whatever the caller wrote, and each kind fails in its own way
            return None


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


def _type(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if value is None and schema.get("nullable") is True:
        return
    yield from Draft202012Validator.VALIDATORS["type"](validator, wanted, value, schema) or ()


def _enum(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if value is None and schema.get("nullable") is True:
        return
    yield from Draft202012Validator.VALIDATORS["enum"](validator, wanted, value, schema) or ()


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


@functools.lru_cache(maxsize=512)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def _finds(pattern: str, text: str) -> bool:
    try:
        return _compiled(pattern).search(text, timeout=_SEARCH_LIMIT_S) is not None
    except TimeoutError:
        raise TooCostly(f"searching for the pattern {pattern!r} takes too long") from None


_OWN: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique_items,
    "type": _type,
    "enum": _enum,
}
_Validator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {
        name: functools.partial(_counted, keyword)
        for name, keyword in {**Draft202012Validator.VALIDATORS, **_OWN}.items()
    },
)


def property_schemas(check: ArgumentsCheck, schema: Any, name: str) -> Any:
    """Return a schema for one property of objects that fit `schema`; {} where nothing is said of it."""
    return _Properties(check, name).of(schema, depth=0)


class _Properties:
    """A walk from the schema of an object to what it says of one property, through references and unions."""

    def __init__(self, check: ArgumentsCheck, name: str) -> None:
        self._check = check
        self._name = name
        self._visits = 0

    def of(self, schema: Any, *, depth: int) -> Any:
        self._visits += 1
        if not isinstance(schema, Mapping) or depth > 16 or self._visits > 1000:
            return {}
        found = [self._own(schema)]
        if isinstance(schema.get("$ref"), str):
            found.append(self.of(self._check.resolve(schema["$ref"]), depth=depth + 1))
        found += [self.of(part, depth=depth + 1) for part in _list(schema.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            ways = [self.of(part, depth=depth + 1) for part in _list(schema.get(keyword))]
            if ways and {} not in ways:
                found.append({"anyOf": ways})
        said = [part for part in found if part != {}]
        return said[0] if len(said) == 1 else {"allOf": said} if said else {}

    def _own(self, schema: Mapping[str, Any]) -> Any:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and self._name in properties:
            return properties[self._name]
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping):
            for pattern, child in patterns.items():
                if _matches(pattern, self._name):
                    return child
        others = schema.get("additionalProperties")
        return others if isinstance(others, Mapping) else {}


def _matches(pattern: str, name: str) -> bool:
    try:
        return _finds(pattern, name)
    except Exception:  # as for the keyword: one that is written wrongly says nothing
        return False


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
