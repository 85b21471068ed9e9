"""Schema rewriter: rewrites a caller's JSON schema to keywords that a grammar can enforce. A pure function.

Keywords are kept if a grammar can enforce them, translated if llguidance needs other ones, left out if JSON
Schema calls them annotations, and otherwise refused with their JSON pointer. An output that fits the new
schema validates against the old one, except for keywords that are reported as not enforced.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from icehouse_server.structured_output.schema.alternatives import SchemaAlternatives, SchemaPart
from icehouse_server.structured_output.schema.patterns import (
    FORMAT_PATTERNS,
    GRAMMAR_FORMATS,
    allowed_names,
    without_look_around,
)
from icehouse_server.structured_output.schema.references import References, UnusableSchema, escaped

_DEPTH_LIMIT = 128
"""Most levels of nested schemas, not counting references."""
_PART_LIMIT = 50_000
"""Most parts of the new schema, which is also llguidance's limit."""

_COPIED = frozenset(
    {"type", "required", "const", "enum", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""Keywords that are copied unchanged."""
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""Bounds of numbers, each with the sign of those that are so large that they change nothing."""
_BOUND_LIMIT = 10**18
"""llguidance cannot build larger bounds, such as those of zod's float32 and float64."""
_NAMED = ("properties", "patternProperties")
_REFUSED = frozenset(
    {
        "if",
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
_UNFIT_FOR_NAMES = re.compile(r"[^A-Za-z0-9_.\-]+")

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class RewrittenSchema:
    """A schema that outputs can be held to."""

    schema: Object
    unenforced: tuple[str, ...] = ()
    """JSON pointers of keywords in the caller's schema that are not enforced."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Closing:
    """How objects are closed to properties that the schema does not name."""

    names: frozenset[str] = frozenset()
    """Properties that an outer schema names."""
    patterns: frozenset[str] = frozenset()
    is_asked_for: bool = False
    """Whether the schema itself closes objects, with `unevaluatedProperties`."""

    @property
    def is_idle(self) -> bool:
        """Whether a schema that names no property stays as it is."""
        return not (self.names or self.patterns or self.is_asked_for)

    def with_known(self, known: _KnownNames) -> _Closing:
        """Return how alternatives are closed if a part beside them names properties."""
        return dataclasses.replace(
            self,
            names=self.names.union(known.names_for(self)),
            patterns=self.patterns.union(known.patterns),
        )


@dataclasses.dataclass(slots=True)
class _KnownNames:
    """The properties that a schema, with its references, names for an object."""

    names: dict[str, None] = dataclasses.field(default_factory=dict)
    required: dict[str, None] = dataclasses.field(default_factory=dict)
    patterns: dict[str, None] = dataclasses.field(default_factory=dict)
    is_object: bool = False
    is_open: bool = False
    """Whether it allows other properties."""
    is_conditional: bool = False
    """Whether only an alternative names some of the properties."""

    def names_for(self, closing: _Closing) -> dict[str, None]:
        """Return the properties that objects may have. Names that are only required are not evaluated."""
        return self.names if closing.is_asked_for else {**self.names, **self.required}


def rewritten(schema: Any) -> RewrittenSchema:
    """Return a schema that a grammar can enforce; raises UnusableSchema."""
    return _Rewriter(schema).result()


class _Rewriter:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._references = References(document)
        self._alternatives = SchemaAlternatives(self._references)
        self._part_count = 0
        self._unenforced: dict[str, None] = {}
        self._names: dict[tuple[str, _Closing | None], str] = {}
        """Names of definitions in the new schema, by the pointer and closing that they stand for."""
        self._taken: set[str] = set()
        self._waiting: collections.deque[tuple[str, Any, str, _Closing | None]] = collections.deque()

    def result(self) -> RewrittenSchema:
        whole = self._schema(self._document, "", _Closing(), 0)
        definitions = {}
        while self._waiting:
            name, schema, pointer, closing = self._waiting.popleft()
            definitions[name] = self._schema(schema, pointer, closing, 0)
        if isinstance(whole, bool):
            whole = {} if whole else {"allOf": [False]}
        if definitions:
            whole = {**whole, "$defs": definitions}
        return RewrittenSchema(whole, tuple(self._unenforced))

    def _schema(self, schema: Any, pointer: str, closing: _Closing | None, depth: int) -> Any:
        self._count(pointer)
        if depth > _DEPTH_LIMIT:
            raise UnusableSchema(f"schemas are nested more than {_DEPTH_LIMIT} deep", pointer)
        if schema is True and closing is not None and not closing.is_idle:
            schema = {}
        if not isinstance(schema, Mapping):
            return schema  # llguidance refuses anything that is not a schema
        normal = self._plain(schema, pointer)
        if normal is None:
            return False
        if (
            closing is not None
            and closing.is_asked_for
            and "additionalProperties" in set(normal) - set(schema)
        ):
            # `propertyNames` evaluates no property, but it was rewritten to close the object.
            raise UnusableSchema("`propertyNames` cannot be enforced within `unevaluatedProperties`", pointer)
        if normal.get("unevaluatedProperties", True) is False:
            closing = _Closing(is_asked_for=True)
        inner = self._inner_closing(normal, pointer, closing)
        result: Object = {}
        for keyword, value in normal.items():
            where = f"{pointer}/{escaped(keyword)}"
            if keyword in _IN_PLACE:
                closes = keyword == _closing_keyword(normal)
                self._add_in_place(
                    result, normal, keyword, SchemaPart(value, pointer), inner if closes else None, depth
                )
            elif keyword == "pattern" and isinstance(value, str):
                self._add_patterns(result, value, where)
            elif keyword == "format" and isinstance(value, str):
                self._add_format(result, value, where)
            elif keyword in _BOUNDS and _is_beyond(keyword, value, normal):
                self._unenforced[where] = None
            elif keyword in (*_COPIED, "pattern", "format"):
                result[keyword] = value
            else:
                self._add_inner(result, normal, keyword, SchemaPart(value, where), depth)
        return self._closed(result, normal, pointer, closing)

    def _add_inner(self, result: Object, normal: Object, keyword: str, part: SchemaPart, depth: int) -> None:
        """Add the schemas of an object's properties or an array's items; leave out any other keyword."""
        has_first_items = isinstance(normal.get("items"), list)  # as before draft 2020-12
        new_keyword = {
            "additionalItems": "items" if has_first_items else "",
            "items": "prefixItems" if has_first_items else "items",
        }.get(keyword, keyword)
        value, pointer = part.schema, part.pointer
        if new_keyword in _NAMED:
            result[new_keyword] = {
                _plain_name(name, new_keyword): self._schema(
                    each, f"{pointer}/{escaped(name)}", _Closing(), depth + 1
                )
                for name, each in value.items()
            }
        elif new_keyword == "prefixItems":
            result[new_keyword] = [
                self._schema(each, f"{pointer}/{i}", _Closing(), depth + 1) for i, each in enumerate(value)
            ]
        elif new_keyword in ("items", "additionalProperties"):
            result[new_keyword] = self._schema(value, pointer, _Closing(), depth + 1)

    def _count(self, pointer: str, count: int = 1) -> None:
        self._part_count += count
        if self._part_count > _PART_LIMIT:
            raise UnusableSchema(f"it has more than {_PART_LIMIT} schemas, not counting references", pointer)

    def _plain(self, schema: Mapping[str, Any], pointer: str) -> Object | None:
        """Return a schema in plainer keywords; None if no value can match it."""
        normal = dict(schema)
        _check_shapes(normal, pointer)
        for keyword in _REFUSED & set(normal):
            self._check_refused(normal, keyword, pointer)
        if "not" in normal:
            negated = normal.pop("not")
            if negated is True or negated == {}:
                return None
            if negated is not False:
                raise UnusableSchema("`not` cannot be enforced, except of everything", f"{pointer}/not")
        if normal.pop("uniqueItems", False) is True:
            self._unenforced[f"{pointer}/uniqueItems"] = None
        self._plain_unevaluated(normal, pointer)
        if "propertyNames" in normal:
            self._plain_names(
                normal,
                pointer,
                "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties",
            )
        return normal

    def _check_refused(self, normal: Object, keyword: str, pointer: str) -> None:
        is_idle = {
            "if": not {"then", "else"} & set(normal),
            "contains": normal.get("minContains") == 0 and "maxContains" not in normal,
        }
        if is_idle.get(keyword, normal[keyword] == {}):
            return
        raise UnusableSchema(f"`{keyword}` cannot be enforced", f"{pointer}/{escaped(keyword)}")

    def _plain_unevaluated(self, normal: Object, pointer: str) -> None:
        """Write `unevaluated…` as `additional…` if no other keyword evaluates anything."""
        is_plain = not set(_IN_PLACE) & set(normal)
        items = normal.pop("unevaluatedItems", True)
        if items not in (True, {}) and "items" not in normal:
            if not is_plain:
                where = f"{pointer}/unevaluatedItems"
                raise UnusableSchema(
                    "`unevaluatedItems` cannot be enforced beside allOf, anyOf, oneOf or $ref", where
                )
            normal["items"] = items
        properties = normal.get("unevaluatedProperties", False)
        if "additionalProperties" in normal or (properties is False and not is_plain):
            return
        if "unevaluatedProperties" in normal:
            if not is_plain and properties not in (True, {}):
                where = f"{pointer}/unevaluatedProperties"
                raise UnusableSchema(
                    "`unevaluatedProperties` can only be true or false beside allOf, anyOf, oneOf or $ref",
                    where,
                )
            normal["additionalProperties"] = normal.pop("unevaluatedProperties")

    def _plain_names(self, normal: Object, pointer: str, value_keyword: str) -> None:
        """Write `propertyNames` as properties and patterns."""
        where = f"{pointer}/propertyNames"
        names = allowed_names(normal.pop("propertyNames"), where, self._references)
        self._unenforced.update(dict.fromkeys(names.unenforced))
        if names.are_any:
            return
        listed = normal.get("properties", {})
        # `propertyNames` evaluates no property.
        if {"patternProperties", "unevaluatedProperties"} & set(normal) or (names.patterns and listed):
            raise UnusableSchema("`propertyNames` cannot be enforced beside other names or patterns", where)
        value = normal.pop("additionalProperties", True)
        if isinstance(value, Mapping):
            value = {"$ref": f"#{pointer}/{value_keyword}"}
        normal["properties"] = {
            **{name: schema if name in names.texts else False for name, schema in listed.items()},
            **{name: value for name in names.texts if name not in listed},
        }
        if names.patterns:
            several = "|".join(f"(?:{pattern})" for pattern in names.patterns)
            normal["patternProperties"] = {names.patterns[0] if len(names.patterns) == 1 else several: value}
        normal["additionalProperties"] = False

    def _reference(self, reference: Any, pointer: str, closing: _Closing | None) -> str:
        target_pointer, target = self._references.target(reference, pointer)
        key = (target_pointer, closing)
        name = self._names.get(key)
        if name is None:
            stem = _UNFIT_FOR_NAMES.sub("_", target_pointer.rpartition("/")[2]) or "root"
            name = stem
            while name in self._taken:
                name = f"{stem}-{len(self._taken)}"
                stem += "_"
            self._taken.add(name)
            self._names[key] = name
            self._waiting.append((name, target, target_pointer, closing))
        return f"#/$defs/{name}"

    def _add_in_place(
        self,
        result: Object,
        normal: Object,
        keyword: str,
        part: SchemaPart,
        closing: _Closing | None,
        depth: int,
    ) -> None:
        value, where = part.schema, f"{part.pointer}/{keyword}"
        if keyword == "$ref":
            result[keyword] = self._reference(value, part.pointer, closing)
            return
        parts = [self._schema(each, f"{where}/{i}", closing, depth + 1) for i, each in enumerate(value)]
        if keyword == "oneOf":
            outer = None if closing is None or closing.patterns else closing.names
            options = [SchemaPart(each, f"{where}/{i}", outer) for i, each in enumerate(value)]
            if not self._alternatives.exclude_each_other(options):
                raise UnusableSchema(
                    "alternatives of `oneOf` may match the same value: use anyOf, or others",
                    where,
                )
            keyword = "anyOf"
        if keyword == "allOf" or (keyword == "anyOf" and "anyOf" in normal and value is not normal["anyOf"]):
            parts = parts if keyword == "allOf" else [{keyword: parts}]
            result["allOf"] = [*result.get("allOf", []), *parts]
        else:
            result[keyword] = parts

    def _add_patterns(self, result: Object, pattern: str, where: str) -> None:
        patterns = without_look_around(pattern)
        if patterns is None:
            raise UnusableSchema("the pattern looks ahead or behind where that cannot be enforced", where)
        result["pattern"] = patterns[-1]
        if patterns[:-1]:
            result["allOf"] = [*result.get("allOf", []), *({"pattern": each} for each in patterns[:-1])]

    def _add_format(self, result: Object, name: str, where: str) -> None:
        if name in GRAMMAR_FORMATS:
            result["format"] = name
        elif name in FORMAT_PATTERNS:
            result["allOf"] = [*result.get("allOf", []), {"pattern": FORMAT_PATTERNS[name]}]
        else:
            self._unenforced[where] = None

    def _inner_closing(self, normal: Object, pointer: str, closing: _Closing | None) -> _Closing | None:
        """Return how in-place subschemas are closed; None if an outer schema does it, or none does."""
        if closing is None or not set(_IN_PLACE) & set(normal) or "additionalProperties" in normal:
            return None
        key = _closing_keyword(normal)
        base = self._known({k: v for k, v in normal.items() if k != key}, pointer)
        _check_unconditional(base, closing, pointer)
        return None if base.is_open or key is None else closing.with_known(base)

    def _closed(self, result: Object, normal: Object, pointer: str, closing: _Closing | None) -> Object:
        """Return a schema that is closed to other properties, unless its alternatives close it."""
        if closing is None or "additionalProperties" in normal or _closing_keyword(normal) is not None:
            return result
        known = self._known(normal, pointer)
        _check_unconditional(known, closing, pointer)
        if known.is_open or (closing.is_idle and not known.is_object):
            return result
        patterns = (
            _plain_name(pattern, _NAMED[1]) for pattern in (*known.patterns, *sorted(closing.patterns))
        )
        rest: Object = {
            _NAMED[0]: dict.fromkeys((*known.names_for(closing), *sorted(closing.names)), True),
            _NAMED[1]: dict.fromkeys(patterns, True),
        }
        self._count(pointer, len(closing.names) + len(closing.patterns))
        if set(_IN_PLACE) & set(result):
            return {**result, "allOf": [*result.get("allOf", []), {**rest, "additionalProperties": False}]}
        for keyword, allowed in rest.items():
            named = result.get(keyword, {})
            if allowed:
                result[keyword] = {**named, **{name: True for name in allowed if name not in named}}
        return {**result, "additionalProperties": False}

    def _known(self, schema: Any, pointer: str) -> _KnownNames:
        """Return the properties that a schema and its in-place subschemas name."""
        known = _KnownNames()
        remaining, seen = [(schema, pointer, False)], set()
        while remaining:
            part, where, is_option = remaining.pop()
            if where in seen or not isinstance(part, Mapping):
                continue
            seen.add(where)
            self._count(where)
            names, patterns = _keys(part, "properties"), _keys(part, "patternProperties")
            is_open = any(
                part.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties")
            )
            known.names.update(dict.fromkeys(names))
            known.patterns.update(dict.fromkeys(patterns))
            known.required.update(dict.fromkeys(n for n in _list(part, "required") if isinstance(n, str)))
            known.is_object |= any(isinstance(part.get(key), Mapping) for key in _NAMED)
            known.is_open |= is_open
            known.is_conditional |= is_option and bool(names or patterns or is_open)
            if isinstance(part.get("$ref"), str):
                target_pointer, target = self._references.target(part["$ref"], where)
                remaining.append((target, target_pointer, is_option))
            for key in ("oneOf", "anyOf", "allOf"):
                each = enumerate(_list(part, key))
                remaining += [(s, f"{where}/{key}/{i}", is_option or key != "allOf") for i, s in each][::-1]
        return known


def _is_beyond(keyword: str, bound: Any, normal: Object) -> bool:
    """Return whether a bound is so large that no answer can reach it."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return False
    limit = (1 << 63) - 1 if normal.get("type") == "integer" else _BOUND_LIMIT
    return bound * _BOUNDS[keyword] > limit


def _check_shapes(normal: Object, pointer: str) -> None:
    for keywords, shape, words in (
        (_NAMED, Mapping, "an object of schemas"),
        (("allOf", "anyOf", "oneOf", "prefixItems"), list, "a list of schemas"),
    ):
        for keyword in keywords:
            if keyword in normal and not isinstance(normal[keyword], shape):
                raise UnusableSchema(f"`{keyword}` must be {words}", f"{pointer}/{keyword}")


def _check_unconditional(known: _KnownNames, closing: _Closing, pointer: str) -> None:
    if closing.is_asked_for and known.is_conditional:
        raise UnusableSchema(
            "`unevaluatedProperties` cannot be enforced where alternatives in allOf or $ref name some",
            pointer,
        )


def _closing_keyword(normal: Object) -> str | None:
    """Return the keyword whose schemas are closed one by one; None if the whole or nothing is closed."""
    key = next((key for key in ("anyOf", "oneOf") if isinstance(normal.get(key), list)), None)
    if key is not None or {*_NAMED, "required"} & set(normal):
        return key
    # A lone reference stays alone: llguidance refuses a recursive one with other keywords beside it.
    alone = [key for key in ("$ref", "allOf") if key in normal]
    return alone[0] if len(alone) == 1 and (alone[0] == "$ref" or len(_list(normal, "allOf")) == 1) else None


def _plain_name(name: str, keyword: str) -> str:
    """Return a property's name, or a name pattern without look-around if possible."""
    patterns = without_look_around(name) if keyword == "patternProperties" else None
    return patterns[0] if patterns is not None and len(patterns) == 1 else name


def _keys(part: Mapping[str, Any], key: str) -> list[str]:
    value = part.get(key)
    return list(value) if isinstance(value, Mapping) else []


def _list(part: Mapping[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []
