"""Schema walk: what the text of one argument means under the schema of its tool.

Formats like XML write values without types. A text is read in every way that it can be, the strictest
first, and the first value that the schema takes is meant: null, true, a number, an object, a list, and last
the text itself, kept byte for byte. So a string stays a string where only strings fit, whatever it looks
like, and unions, lists of types, references, constants and enumerations need no rules of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from icehouse_server.text.values.json_text import PYTHON_LITERALS, quoted, strict, tolerant
from icehouse_server.text.values.python_text import python_literal
from icehouse_server.text.values.source import Malformed
from icehouse_server.text.values.validation import ArgumentsCheck, property_schemas


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One argument as a format without types writes it."""

    name: str
    text: str
    is_text: bool | None = None
    """Whether it is a string, where the format says so."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadValue:
    """One reading of a text: `json_text` is the value as JSON, numbers as they were written."""

    json_text: str
    is_repaired: bool = False


class ArgumentsWalk:
    """The arguments of one tool. Made once for a request."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.check = ArgumentsCheck(parameters)
        self._parameters = parameters
        self._schemas: dict[str, Any] = {}

    def read(self, argument: Argument, *, is_python: bool = False) -> ReadValue:
        """Return what the text of one argument means; the likeliest where nothing fits the schema.

        `is_python` where the family spells True, False and None. Raises TooCostly.
        """
        schema = self._schema(argument.name)
        first: ReadValue | None = None
        for value in _readings(argument, is_python=is_python):
            first = first or value
            if schema in ({}, True) or not self.check.problem(strict(value.json_text), schema=schema):
                return value
        assert first is not None, "every text is a string"
        return first

    def declares(self, name: str) -> bool:
        """Whether an argument may have this name: the schema says something of it, or nothing of any."""
        return bool(name) and (not self._parameters.get("properties") or self._schema(name) != {})

    def _schema(self, name: str) -> Any:
        if name not in self._schemas:
            self._schemas[name] = property_schemas(self.check, self._parameters, name)
        return self._schemas[name]


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
    lenient: list[Callable[[], tuple[str, bool]]] = [lambda: tolerant(bare, is_python=is_python)]
    if is_python:
        lenient.append(lambda: python_literal(bare))
    for read in lenient:
        try:
            found, is_repaired = read()
            yield ReadValue(found, is_repaired)
        except Malformed:
            continue
    if bare != text or argument.is_text is False:
        yield ReadValue(quoted(bare), is_repaired=True)


def _is_json(text: str) -> bool:
    try:
        strict(text)
    except ValueError:
        return False
    return True


def as_object(members: Mapping[str, str]) -> str:
    """Return an object whose values are JSON already."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in members.items()) + "}"


def schema_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, as templates are given it."""
    parameters = tool["function"].get("parameters")
    return parameters if isinstance(parameters, Mapping) else {}
