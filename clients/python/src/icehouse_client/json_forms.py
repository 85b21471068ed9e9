"""JSON forms: each tells the JSON schema of its values and reads one, so that the two agree.

A value fits a form when it validates against the form's schema and what makes the Python value of it (a
dataclass's own checks, pydantic's validators) takes it too.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

Path = tuple[str | int, ...]
"""Where in a value: names of properties and numbers of items."""

Definitions = dict[str, Any]
"""Schemas that are referred to, by their names in "$defs"."""

Kind = Literal["string", "integer", "number", "boolean", "null", "array"]


class Mismatch(Exception):
    """A value does not fit; `problem` says why, of the part at `path`."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


class Form(Protocol):
    """What a value may be."""

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the JSON schema; what it refers to is added to `definitions`."""
        ...

    def read(self, value: object, path: Path) -> Any:
        """Return the Python value of what was read from JSON; raises Mismatch."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What else holds for a type, as `Annotated[str, Limits(max_length=30)]` has it.

    `minimum` and `maximum` are a number's, both included; the lengths those of a text, in characters, or of a
    list, in items.
    """

    minimum: float | None = None
    maximum: float | None = None
    min_length: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("minimum", "maximum"):
            limit = getattr(self, name)
            if limit is not None and not math.isfinite(limit):
                raise ValueError(f"{name} is {limit}, and must be finite")
        for name in ("min_length", "max_length"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}, and must be at least 0")

    def keywords(self, kind: Kind) -> dict[str, float]:
        """Return the schema's keywords; raises TypeError where a limit is not one of the kind's."""
        known = _KEYWORDS.get(kind, {})
        given = {name: limit for name, limit in dataclasses.asdict(self).items() if limit is not None}
        if foreign := sorted(given.keys() - known.keys()):
            raise TypeError(f"{foreign[0]} is no limit of JSON's {kind}")
        return {known[name]: limit for name, limit in given.items()}

    def check(self, *, value: float | None = None, length: int = 0, path: Path) -> None:
        """Raise Mismatch where a number or a length is outside."""
        if value is not None:
            _check_between(value, self.minimum, self.maximum, what="the number", path=path)
        _check_between(length, self.min_length, self.max_length, what="the length", path=path)


_KEYWORDS: Mapping[Kind, Mapping[str, str]] = {
    "string": {"min_length": "minLength", "max_length": "maxLength"},
    "array": {"min_length": "minItems", "max_length": "maxItems"},
    "integer": {"minimum": "minimum", "maximum": "maximum"},
    "number": {"minimum": "minimum", "maximum": "maximum"},
}

NO_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON."""

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema that everything validates against."""
        return {}

    def read(self, value: object, path: Path) -> Any:
        """Return it as it is."""
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """A text, a number, true or false, or null."""

    kind: Kind
    limits: Limits = NO_LIMITS

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema of the kind, within its limits."""
        return {"type": self.kind, **self.limits.keywords(self.kind)}

    def read(self, value: object, path: Path) -> Any:
        """Return str, int, float, bool or None. To JSON 1.0 is an integer too."""
        if self.kind == "string" and isinstance(value, str):
            self.limits.check(length=len(value), path=path)
            return value
        if self.kind == "boolean" and isinstance(value, bool):
            return value
        if self.kind == "null" and value is None:
            return None
        if not isinstance(value, bool) and isinstance(value, int | float):
            if self.kind == "number":
                self.limits.check(value=value, path=path)
                return _float_of(value)
            if self.kind == "integer" and (isinstance(value, int) or value.is_integer()):
                self.limits.check(value=value, path=path)
                return int(value)
        raise Mismatch(path, f"it is {_kind_of(value)}, not of type {self.kind}")


@dataclasses.dataclass(frozen=True, slots=True)
class Constants:
    """One of several constants: each as it is in JSON, and the value that stands for it."""

    choices: tuple[tuple[str | float | None, Any], ...]

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema that lists them."""
        return {"enum": [constant for constant, _ in self.choices]}

    def read(self, value: object, path: Path) -> Any:
        """Return the value of the constant."""
        for constant, found in self.choices:
            # Python has True == 1, JSON has not.
            if isinstance(value, bool) is isinstance(constant, bool) and value == constant:
                return found
        listed = ", ".join(json.dumps(constant, ensure_ascii=False) for constant, _ in self.choices)
        raise Mismatch(path, f"it is none of {listed}")


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A list of values of one form, made into a list or a tuple."""

    item: Form
    make: Callable[[Sequence[Any]], Any]
    limits: Limits = NO_LIMITS

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema of an array."""
        return {"type": "array", "items": self.item.schema(definitions), **self.limits.keywords("array")}

    def read(self, value: object, path: Path) -> Any:
        """Return the list, its items read."""
        if not isinstance(value, list):
            raise Mismatch(path, f"it is {_kind_of(value)}, not a list")
        self.limits.check(length=len(value), path=path)
        return self.make([self.item.read(item, (*path, index)) for index, item in enumerate(value)])


@dataclasses.dataclass(frozen=True, slots=True)
class FixedItems:
    """A tuple, in which each item has a form of its own."""

    items: tuple[Form, ...]

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema of an array of so many items."""
        count = len(self.items)
        prefix = [item.schema(definitions) for item in self.items]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": count, "maxItems": count}

    def read(self, value: object, path: Path) -> Any:
        """Return the tuple, its items read."""
        if not isinstance(value, list) or len(value) != len(self.items):
            raise Mismatch(path, f"it is {_kind_of(value)}, not a list of {len(self.items)}")
        return tuple(
            form.read(item, (*path, index))
            for index, (form, item) in enumerate(zip(self.items, value, strict=True))
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """An object with any names, whose values have one form."""

    value: Form

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema of an object with any properties."""
        return {"type": "object", "additionalProperties": self.value.schema(definitions)}

    def read(self, value: object, path: Path) -> Any:
        """Return the dict, its values read."""
        if not isinstance(value, dict):
            raise Mismatch(path, f"it is {_kind_of(value)}, not an object")
        return {name: self.value.read(item, (*path, name)) for name, item in value.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class OneOf:
    """A value of one of several forms; it is read as the first that it fits."""

    forms: tuple[Form, ...]

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema that any of them satisfies."""
        return {"anyOf": [form.schema(definitions) for form in self.forms]}

    def read(self, value: object, path: Path) -> Any:
        """Return it read as the first that it fits."""
        misses: list[Mismatch] = []
        for form in self.forms:
            try:
                return form.read(value, path)
            except Mismatch as error:
                misses.append(error)
        nearest = max(misses, key=lambda miss: len(miss.path))
        if len(nearest.path) > len(path):
            raise nearest
        raise Mismatch(path, " and ".join(miss.problem for miss in misses))


@dataclasses.dataclass(frozen=True, slots=True)
class Property:
    """One property of an object."""

    form: Form
    is_required: bool


@dataclasses.dataclass(slots=True)
class Record:
    """An object with known properties, of which `make` makes the value. One that is within itself has its
    schema in the definitions, under its name."""

    name: str
    make: Callable[..., Any]
    properties: dict[str, Property] = dataclasses.field(default_factory=dict)
    is_within_itself: bool = False

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the schema of the object, with nothing beside its properties, or a reference to it."""
        if not self.is_within_itself:
            return self._schema(definitions)
        if self.name not in definitions:
            definitions[self.name] = {}
            definitions[self.name] = self._schema(definitions)
        return {"$ref": f"#/$defs/{self.name}"}

    def _schema(self, definitions: Definitions) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: found.form.schema(definitions) for name, found in self.properties.items()},
            "required": [name for name, found in self.properties.items() if found.is_required],
            "additionalProperties": False,
        }

    def read(self, value: object, path: Path) -> Any:
        """Return what is made of the properties; a ValueError of its own checks is a Mismatch."""
        if not isinstance(value, dict):
            raise Mismatch(path, f"it is {_kind_of(value)}, not an object")
        for name, known in self.properties.items():
            if known.is_required and name not in value:
                raise Mismatch((*path, name), "it is missing")
        for name in value:
            if name not in self.properties:
                raise Mismatch((*path, name), "there is no such property")
        read = {name: self.properties[name].form.read(item, (*path, name)) for name, item in value.items()}
        try:
            return self.make(**read)
        except ValueError as error:
            raise Mismatch(path, str(error)) from error


class Model(Protocol):
    """What is wanted of a pydantic model, which knows its own schema."""

    @classmethod
    def model_json_schema(cls, *, ref_template: str) -> dict[str, Any]:
        """Return its JSON schema."""
        ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any:
        """Return the value of a JSON text; raises ValueError."""
        ...


class ModelForm:
    """A pydantic model. What its schema refers to is put beside the other definitions, under names that begin
    with `name`."""

    def __init__(self, name: str, model: type[Model]) -> None:
        self._name = name
        self._model = model
        self._schema = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")

    def schema(self, definitions: Definitions) -> dict[str, Any]:
        """Return the model's own schema, closed: with nothing beside its properties unless it says so."""
        schema = dict(self._schema)
        for name, definition in schema.pop("$defs", {}).items():
            definitions[f"{self._name}.{name}"] = _closed(definition)
        return dict(_closed(schema))

    def read(self, value: object, path: Path) -> Any:
        """Return the model, validated as JSON; pydantic's ValidationError, a ValueError, is a Mismatch."""
        try:
            return self._model.model_validate_json(json.dumps(value))
        except ValueError as error:
            raise Mismatch(path, str(error)) from error


def spelled(path: Path) -> str:
    """Return a path as Python spells it: "stops[3].name"; empty for the whole."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def _closed(schema: Any) -> Any:
    """Return a schema whose objects with properties have no others, unless it says of them what they are."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for keyword in ("properties", "patternProperties"):
        if keyword in schema:
            closed[keyword] = {name: _closed(inner) for name, inner in schema[keyword].items()}
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            closed[keyword] = _closed(schema[keyword])
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if keyword in schema:
            closed[keyword] = [_closed(inner) for inner in schema[keyword]]
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _check_between(number: float, least: float | None, most: float | None, *, what: str, path: Path) -> None:
    if least is not None and number < least:
        raise Mismatch(path, f"{what} is {number}, and must be at least {least}")
    if most is not None and number > most:
        raise Mismatch(path, f"{what} is {number}, and must be at most {most}")


def _float_of(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        # As `json` reads 1e400.
        return math.inf if number > 0 else -math.inf


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"
