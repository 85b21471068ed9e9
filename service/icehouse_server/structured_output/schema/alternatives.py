"""Alternatives of a `oneOf`: whether no two of them can match the same value. Pure functions, any thread."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from icehouse_server.structured_output.schema.references import References

_STEP_LIMIT = 20_000
"""Most comparisons; so many take a second. Beyond that, alternatives count as overlapping."""
_DEPTH_LIMIT = 8
_ANNOTATIONS = frozenset({"$ref", "allOf", "title", "description", "default"})
_NAMING = frozenset({"patternProperties", "propertyNames", "unevaluatedProperties", "anyOf", "oneOf"})
"""Keywords that may let an object have more than its properties."""
_TYPE_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema of the document, and its JSON pointer."""

    schema: Any
    pointer: str
    outer_names: frozenset[str] | None = frozenset()
    """Properties that the grammar allows in its objects besides their own; None for any."""

    def options(self, key: str) -> list[SchemaPart]:
        """Return the alternatives under a keyword; none if the schema does not have it."""
        options = self.schema.get(key) if isinstance(self.schema, Mapping) else None
        listed = enumerate(options if isinstance(options, list) else ())
        return [SchemaPart(option, f"{self.pointer}/{key}/{i}", self.outer_names) for i, option in listed]


class SchemaAlternatives:
    """Compares alternatives of one document's schemas."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._step_count = 0

    def exclude_each_other(self, parts: list[SchemaPart]) -> bool:
        """Return whether no value that a grammar allows for one of them is valid for another."""
        if self._have_tags(parts):
            return True
        return all(self._excludes(one, other, 0) for one, other in itertools.permutations(parts, 2))

    def _have_tags(self, parts: list[SchemaPart]) -> bool:
        """Return whether one required property distinguishes them all: the usual case, and a cheap one."""
        tags = [
            {
                name: values
                for facet in self._facets(part)
                if _types(facet) == {"object"}
                for name in _required(facet)
                if isinstance(property := _properties(facet).get(name), Mapping)
                and (values := _values(SchemaPart(property, ""))) is not None
            }
            for part in parts
        ]
        names = set(tags[0]).intersection(*tags) if tags else set()
        return any(
            sum(len(t[name]) for t in tags) == len(set().union(*(t[name] for t in tags))) for name in names
        )

    def _excludes(self, made: SchemaPart, other: SchemaPart, depth: int) -> bool:
        """Return whether no value that a grammar allows for `made` is valid for `other`."""
        self._step_count += 1
        if self._step_count > _STEP_LIMIT or depth > _DEPTH_LIMIT:
            return False
        if made.schema is False or other.schema is False:
            return True
        for key in ("anyOf", "oneOf"):
            # With other keywords beside it, an option would have more properties than its own.
            if (options := made.options(key)) and not set(made.schema) - {key} - _ANNOTATIONS:
                return all(self._excludes(option, other, depth + 1) for option in options)
            options = other.options(key)
            if options and all(self._excludes(made, option, depth + 1) for option in options):
                return True
        facets, others = list(self._facets(made)), list(self._facets(other))
        if any(self._differ(one, another, depth) for one in facets for another in others):
            return True
        return len(facets) == 1 and any(
            _lacks(facets[0], name) for part in others for name in _required(part)
        )

    def _facets(self, part: SchemaPart) -> Iterator[SchemaPart]:
        """Yield all schemas that a value must match because of `$ref` and `allOf`."""
        remaining, seen = [part], set()
        while remaining:
            part = remaining.pop()
            if part.pointer in seen or not isinstance(part.schema, Mapping):
                continue
            seen.add(part.pointer)
            if "$ref" in part.schema:
                pointer, schema = self._references.target(part.schema["$ref"], part.pointer)
                remaining.append(SchemaPart(schema, pointer, part.outer_names))
            remaining += part.options("allOf")
            if set(part.schema) - _ANNOTATIONS:
                yield part

    def _differ(self, made: SchemaPart, other: SchemaPart, depth: int) -> bool:
        types, other_types = _types(made), _types(other)
        if types and other_types and not types & other_types:
            return True
        values, other_values = _values(made), _values(other)
        if values is not None and other_values is not None:
            return not values & other_values
        if {"object"} not in (types, other_types):
            return False
        properties, other_properties = _properties(made), _properties(other)
        return any(
            name in properties
            and name in other_properties
            and self._excludes(
                SchemaPart(properties[name], f"{made.pointer}/properties/{name}"),
                SchemaPart(other_properties[name], f"{other.pointer}/properties/{name}"),
                depth + 1,
            )
            for name in (*_required(made), *_required(other))
        )


def _types(part: SchemaPart) -> set[str]:
    """Return the types that a matching value may have; empty if any type matches."""
    types = part.schema.get("type")
    if isinstance(types, str):
        types = [types]
    if isinstance(types, list):
        return {"number" if name == "integer" else str(name) for name in types}
    return {
        _TYPE_NAMES.get(type(value), "array" if isinstance(value, list) else "object")
        for value in _listed(part) or ()
    }


def _values(part: SchemaPart) -> set[str] | None:
    values = _listed(part)
    if values is None or any(isinstance(value, float | list | dict) for value in values):
        return None
    return {json.dumps(value) for value in values}


def _listed(part: SchemaPart) -> list[Any] | None:
    if "const" in part.schema:
        return [part.schema["const"]]
    listed = part.schema.get("enum")
    return listed if isinstance(listed, list) else None


def _properties(part: SchemaPart) -> Mapping[str, Any]:
    properties = part.schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(part: SchemaPart) -> list[str]:
    names = part.schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _lacks(part: SchemaPart, name: str) -> bool:
    """Return whether the grammar never gives this object the property."""
    schema = part.schema
    if _types(part) != {"object"} or "properties" not in schema or set(schema) & _NAMING:
        return False
    if "additionalProperties" not in schema and (part.outer_names is None or name in part.outer_names):
        return False
    return (
        schema.get("additionalProperties", False) is False
        and name not in _properties(part)
        and name not in _required(part)
    )
