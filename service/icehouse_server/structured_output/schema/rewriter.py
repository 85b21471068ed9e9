"""Schema rewriter: turns a caller's JSON schema into keywords that a grammar can enforce. A pure function.

What a library writes by default is kept where a grammar can keep it, said in other keywords where llguidance
wants that, left out where JSON Schema calls it an annotation, and refused with its place otherwise. An output
held to the new schema validates against the old one, but for keywords that are told as not enforced.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from icehouse_server.structured_output.schema.alternatives import Alternatives, SchemaPart
from icehouse_server.structured_output.schema.patterns import (
    FORMAT_PATTERNS,
    GRAMMAR_FORMATS,
    allowed_names,
    without_look_around,
)
from icehouse_server.structured_output.schema.references import References, UnusableSchema, escaped

_DEPTH_LIMIT = 128
"""Most schemas within each other, references apart."""
_PART_LIMIT = 50_000
"""Most parts of the new schema; llguidance takes no more."""

_KEPT = frozenset(
    {"type", "required", "const", "enum", "minItems", "maxItems", "minProperties", "maxProperties"}
    | {"minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""Keywords that stay as they are."""
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""Bounds of numbers, and the sign of a bound so large that it changes nothing."""
_BOUND_LIMIT = 10**18
"""llguidance builds no larger bounds, such as those of zod's float32 and float64."""
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
class Rewritten:
    """A schema that outputs can be held to."""

    schema: Object
    unenforced: tuple[str, ...] = ()
    """Keywords of the caller's schema that are not enforced, by their JSON pointers."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Closing:
    """How objects are closed to properties that a schema does not name, where it says nothing of these."""

    names: frozenset[str] = frozenset()
    """Properties that an outer schema names."""
    patterns: frozenset[str] = frozenset()
    is_asked_for: bool = False
    """Whether the schema itself closes them, with `unevaluatedProperties`."""

    @property
    def is_idle(self) -> bool:
        """Whether a schema that names no property stays as it is."""
        return not (self.names or self.patterns or self.is_asked_for)

    def with_known(self, known: _KnownNames) -> _Closing:
        """Return how alternatives are closed beside a part that names properties."""
        return dataclasses.replace(
            self,
            names=self.names.union(known.names_for(self)),
            patterns=self.patterns.union(known.patterns),
        )


@dataclasses.dataclass(slots=True)
class _KnownNames:
    """What a schema, with its references, says of an object's properties."""

    names: dict[str, None] = dataclasses.field(default_factory=dict)
    required: dict[str, None] = dataclasses.field(default_factory=dict)
    patterns: dict[str, None] = dataclasses.field(default_factory=dict)
    is_object: bool = False
    is_open: bool = False
    """Whether it says something of other properties."""
    is_conditional: bool = False
    """Whether only an alternative names some of them."""

    def names_for(self, closing: _Closing) -> dict[str, None]:
        """Return the properties that objects may have; only-required ones do not count as evaluated."""
        return self.names if closing.is_asked_for else {**self.names, **self.required}


def rewritten(schema: Any) -> Rewritten:
    """Return a schema that a grammar can enforce; raises UnusableSchema."""
    return _Rewriter(schema).result()


class _Rewriter:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._references = References(document)
        self._alternatives = Alternatives(self._references)
        self._part_count = 0
        self._unenforced: dict[str, None] = {}
        self._names: dict[tuple[str, _Closing | None], str] = {}
        """Names of definitions in the new schema, by what is referred to."""
        self._taken: set[str] = set()
        self._waiting: collections.deque[tuple[str, Any, str, _Closing | None]] = collections.deque()

    def result(self) -> Rewritten:
        whole = self._schema(self._document, "", _Closing(), 0)
        definitions = {}
        while self._waiting:
            name, schema, place, closing = self._waiting.popleft()
            definitions[name] = self._schema(schema, place, closing, 0)
        if isinstance(whole, bool):
            whole = {} if whole else {"allOf": [False]}
        if definitions:
            whole = {**whole, "$defs": definitions}
        return Rewritten(whole, tuple(self._unenforced))

    def _schema(self, schema: Any, place: str, closing: _Closing | None, depth: int) -> Any:
        self._count(place)
        if depth > _DEPTH_LIMIT:
            raise UnusableSchema(f"schemas are nested more than {_DEPTH_LIMIT} deep", place)
        if schema is True and closing is not None and not closing.is_idle:
            schema = {}
        if not isinstance(schema, Mapping):
            return schema  # llguidance tells of what is no schema at all
        said = self._plain(schema, place)
        if said is None:
            return False
        if closing is not None and closing.is_asked_for and "additionalProperties" in set(said) - set(schema):
            # What a name is allowed to be evaluates no property, but closes the object here.
            raise UnusableSchema("`propertyNames` cannot be kept to within `unevaluatedProperties`", place)
        if said.get("unevaluatedProperties", True) is False:
            closing = _Closing(is_asked_for=True)
        inner = self._inner_closing(said, place, closing)
        made: Object = {}
        for keyword, value in said.items():
            where = f"{place}/{escaped(keyword)}"
            if keyword in _IN_PLACE:
                closes = keyword == _closing_keyword(said)
                self._add_in_place(
                    made, said, keyword, SchemaPart(value, place), inner if closes else None, depth
                )
            elif keyword == "pattern" and isinstance(value, str):
                self._add_patterns(made, value, where)
            elif keyword == "format" and isinstance(value, str):
                self._add_format(made, value, where)
            elif keyword in _BOUNDS and _is_beyond(keyword, value, said):
                self._unenforced[where] = None
            elif keyword in (*_KEPT, "pattern", "format"):
                made[keyword] = value
            else:
                self._add_inner(made, said, keyword, SchemaPart(value, where), depth)
        return self._closed(made, said, place, closing)

    def _add_inner(self, made: Object, said: Object, keyword: str, part: SchemaPart, depth: int) -> None:
        """Add the schemas of an object's properties or an array's items; leave out any other keyword."""
        has_first_items = isinstance(said.get("items"), list)  # as before draft 2020-12
        new_keyword = {
            "additionalItems": "items" if has_first_items else "",
            "items": "prefixItems" if has_first_items else "items",
        }.get(keyword, keyword)
        value, place = part.schema, part.place
        if new_keyword in _NAMED:
            made[new_keyword] = {
                _plain_name(name, new_keyword): self._schema(
                    each, f"{place}/{escaped(name)}", _Closing(), depth + 1
                )
                for name, each in value.items()
            }
        elif new_keyword == "prefixItems":
            made[new_keyword] = [
                self._schema(each, f"{place}/{i}", _Closing(), depth + 1) for i, each in enumerate(value)
            ]
        elif new_keyword in ("items", "additionalProperties"):
            made[new_keyword] = self._schema(value, place, _Closing(), depth + 1)

    def _count(self, place: str, count: int = 1) -> None:
        self._part_count += count
        if self._part_count > _PART_LIMIT:
            raise UnusableSchema(f"it comes to more than {_PART_LIMIT} schemas, references apart", place)

    def _plain(self, schema: Mapping[str, Any], place: str) -> Object | None:
        """Return a schema in plainer keywords; None where nothing matches it."""
        said = dict(schema)
        _check_shapes(said, place)
        for keyword in _REFUSED & set(said):
            self._check_refused(said, keyword, place)
        if "not" in said:
            negated = said.pop("not")
            if negated is True or negated == {}:
                return None
            if negated is not False:
                raise UnusableSchema("`not` cannot be kept to, except of everything", f"{place}/not")
        if said.pop("uniqueItems", False) is True:
            self._unenforced[f"{place}/uniqueItems"] = None
        self._plain_unevaluated(said, place)
        if "propertyNames" in said:
            self._plain_names(
                said,
                place,
                "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties",
            )
        return said

    def _check_refused(self, said: Object, keyword: str, place: str) -> None:
        is_idle = {
            "if": not {"then", "else"} & set(said),
            "contains": said.get("minContains") == 0 and "maxContains" not in said,
        }
        if is_idle.get(keyword, said[keyword] == {}):
            return
        raise UnusableSchema(f"`{keyword}` cannot be kept to", f"{place}/{escaped(keyword)}")

    def _plain_unevaluated(self, said: Object, place: str) -> None:
        """Write `unevaluated…` as `additional…` where nothing else evaluates."""
        is_plain = not set(_IN_PLACE) & set(said)
        items = said.pop("unevaluatedItems", True)
        if items not in (True, {}) and "items" not in said:
            if not is_plain:
                where = f"{place}/unevaluatedItems"
                raise UnusableSchema(
                    "`unevaluatedItems` cannot be kept to beside allOf, anyOf, oneOf or $ref", where
                )
            said["items"] = items
        properties = said.get("unevaluatedProperties", False)
        if "additionalProperties" in said or (properties is False and not is_plain):
            return
        if "unevaluatedProperties" in said:
            if not is_plain and properties not in (True, {}):
                where = f"{place}/unevaluatedProperties"
                raise UnusableSchema(
                    "`unevaluatedProperties` can only be true or false beside allOf, anyOf, oneOf or $ref",
                    where,
                )
            said["additionalProperties"] = said.pop("unevaluatedProperties")

    def _plain_names(self, said: Object, place: str, value_keyword: str) -> None:
        """Write `propertyNames` as properties and patterns."""
        where = f"{place}/propertyNames"
        names = allowed_names(said.pop("propertyNames"), where, self._references)
        self._unenforced.update(dict.fromkeys(names.unenforced))
        if names.are_any:
            return
        listed = said.get("properties", {})
        # What a name is allowed to be evaluates no property.
        if {"patternProperties", "unevaluatedProperties"} & set(said) or (names.patterns and listed):
            raise UnusableSchema("`propertyNames` cannot be kept to beside other names or patterns", where)
        value = said.pop("additionalProperties", True)
        if isinstance(value, Mapping):
            value = {"$ref": f"#{place}/{value_keyword}"}
        said["properties"] = {
            **{name: schema if name in names.texts else False for name, schema in listed.items()},
            **{name: value for name in names.texts if name not in listed},
        }
        if names.patterns:
            several = "|".join(f"(?:{pattern})" for pattern in names.patterns)
            said["patternProperties"] = {names.patterns[0] if len(names.patterns) == 1 else several: value}
        said["additionalProperties"] = False

    def _reference(self, reference: Any, place: str, closing: _Closing | None) -> str:
        target_place, target = self._references.target(reference, place)
        key = (target_place, closing)
        name = self._names.get(key)
        if name is None:
            stem = _UNFIT_FOR_NAMES.sub("_", target_place.rpartition("/")[2]) or "root"
            name = stem
            while name in self._taken:
                name = f"{stem}-{len(self._taken)}"
                stem += "_"
            self._taken.add(name)
            self._names[key] = name
            self._waiting.append((name, target, target_place, closing))
        return f"#/$defs/{name}"

    def _add_in_place(
        self, made: Object, said: Object, keyword: str, part: SchemaPart, closing: _Closing | None, depth: int
    ) -> None:
        value, where = part.schema, f"{part.place}/{keyword}"
        if keyword == "$ref":
            made[keyword] = self._reference(value, part.place, closing)
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
        if keyword == "allOf" or (keyword == "anyOf" and "anyOf" in said and value is not said["anyOf"]):
            parts = parts if keyword == "allOf" else [{keyword: parts}]
            made["allOf"] = [*made.get("allOf", []), *parts]
        else:
            made[keyword] = parts

    def _add_patterns(self, made: Object, pattern: str, where: str) -> None:
        patterns = without_look_around(pattern)
        if patterns is None:
            raise UnusableSchema("the pattern looks ahead or behind where that cannot be kept to", where)
        made["pattern"] = patterns[-1]
        if patterns[:-1]:
            made["allOf"] = [*made.get("allOf", []), *({"pattern": each} for each in patterns[:-1])]

    def _add_format(self, made: Object, name: str, where: str) -> None:
        if name in GRAMMAR_FORMATS:
            made["format"] = name
        elif name in FORMAT_PATTERNS:
            made["allOf"] = [*made.get("allOf", []), {"pattern": FORMAT_PATTERNS[name]}]
        else:
            self._unenforced[where] = None

    def _inner_closing(self, said: Object, place: str, closing: _Closing | None) -> _Closing | None:
        """Return how subschemas in place are closed; None where that is done around them, or not at all."""
        if closing is None or not set(_IN_PLACE) & set(said) or "additionalProperties" in said:
            return None
        key = _closing_keyword(said)
        base = self._known({k: v for k, v in said.items() if k != key}, place)
        _check_unconditional(base, closing, place)
        return None if base.is_open or key is None else closing.with_known(base)

    def _closed(self, made: Object, said: Object, place: str, closing: _Closing | None) -> Object:
        """Return a schema that allows no other properties, unless its alternatives see to that."""
        if closing is None or "additionalProperties" in said or _closing_keyword(said) is not None:
            return made
        known = self._known(said, place)
        _check_unconditional(known, closing, place)
        if known.is_open or (closing.is_idle and not known.is_object):
            return made
        patterns = (
            _plain_name(pattern, _NAMED[1]) for pattern in (*known.patterns, *sorted(closing.patterns))
        )
        rest: Object = {
            _NAMED[0]: dict.fromkeys((*known.names_for(closing), *sorted(closing.names)), True),
            _NAMED[1]: dict.fromkeys(patterns, True),
        }
        self._count(place, len(closing.names) + len(closing.patterns))
        if set(_IN_PLACE) & set(made):
            return {**made, "allOf": [*made.get("allOf", []), {**rest, "additionalProperties": False}]}
        for keyword, allowed in rest.items():
            named = made.get(keyword, {})
            if allowed:
                made[keyword] = {**named, **{name: True for name in allowed if name not in named}}
        return {**made, "additionalProperties": False}

    def _known(self, schema: Any, place: str) -> _KnownNames:
        """Return the properties that a schema and its subschemas in place name."""
        known = _KnownNames()
        remaining, seen = [(schema, place, False)], set()
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
                target_place, target = self._references.target(part["$ref"], where)
                remaining.append((target, target_place, is_option))
            for key in ("oneOf", "anyOf", "allOf"):
                each = enumerate(_list(part, key))
                remaining += [(s, f"{where}/{key}/{i}", is_option or key != "allOf") for i, s in each][::-1]
        return known


def _is_beyond(keyword: str, bound: Any, said: Object) -> bool:
    """Return whether a bound is so large that no answer reaches it."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return False
    limit = (1 << 63) - 1 if said.get("type") == "integer" else _BOUND_LIMIT
    return bound * _BOUNDS[keyword] > limit


def _check_shapes(said: Object, place: str) -> None:
    for keywords, shape, words in (
        (_NAMED, Mapping, "an object of schemas"),
        (("allOf", "anyOf", "oneOf", "prefixItems"), list, "a list of schemas"),
    ):
        for keyword in keywords:
            if keyword in said and not isinstance(said[keyword], shape):
                raise UnusableSchema(f"`{keyword}` must be {words}", f"{place}/{keyword}")


def _check_unconditional(known: _KnownNames, closing: _Closing, place: str) -> None:
    if closing.is_asked_for and known.is_conditional:
        raise UnusableSchema(
            "`unevaluatedProperties` cannot be kept to where alternatives in allOf or $ref name some", place
        )


def _closing_keyword(said: Object) -> str | None:
    """Return the keyword whose schemas are closed one by one; None where the whole is closed, or nothing."""
    key = next((key for key in ("anyOf", "oneOf") if isinstance(said.get(key), list)), None)
    if key is not None or {*_NAMED, "required"} & set(said):
        return key
    # A reference that stands alone stays alone: llguidance refuses one within itself beside other keywords.
    alone = [key for key in ("$ref", "allOf") if key in said]
    return alone[0] if len(alone) == 1 and (alone[0] == "$ref" or len(_list(said, "allOf")) == 1) else None


def _plain_name(name: str, keyword: str) -> str:
    """Return a property's name, or a pattern of names, without look-around if possible."""
    patterns = without_look_around(name) if keyword == "patternProperties" else None
    return patterns[0] if patterns is not None and len(patterns) == 1 else name


def _keys(part: Mapping[str, Any], key: str) -> list[str]:
    value = part.get(key)
    return list(value) if isinstance(value, Mapping) else []


def _list(part: Mapping[str, Any], key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []
