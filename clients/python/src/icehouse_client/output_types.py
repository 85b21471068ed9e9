"""Output types: the JSON schema of a Python type, and outputs read into it.

A type is str, int, float, bool, None, an Enum or a Literal of such values, a dataclass, a TypedDict, a
pydantic model, a list, a tuple or a dict from str of these, or several of them joined by `|`. A property with
a default may be missing. pydantic is not imported here: a model brings what is asked of it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NewType, NoReturn, NotRequired, Required, Union

from icehouse_client import formats
from icehouse_client.json_forms import (
    Anything,
    Constants,
    Definitions,
    FixedItems,
    Form,
    Items,
    Kind,
    Limits,
    Mismatch,
    ModelForm,
    OneOf,
    Property,
    Record,
    Scalar,
    Table,
)
from icehouse_client.requests import Options

_SCALARS: Sequence[tuple[object, Kind]] = (
    (str, "string"),
    (int, "integer"),
    (float, "number"),
    (bool, "boolean"),
    (type(None), "null"),
    (None, "null"),
)
_LISTS = (list, collections.abc.Sequence, collections.abc.MutableSequence)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def schema_of(output_type: object) -> dict[str, Any]:
    """Return the JSON schema of a type; raises TypeError, with the field's path, for one that has none."""
    definitions: Definitions = {}
    schema = form_of(output_type).schema(definitions)
    return {**schema, "$defs": definitions} if definitions else schema


def typed_options(options: Options, output_type: object) -> Options:
    """Return a request's options that hold its output to a type; a format of the caller's own is kept."""
    schema = schema_of(output_type)
    if "response_format" in options:
        return options
    return {**options, "response_format": formats.json_schema(schema)}


def read_json(text: str, output_type: object) -> Any:
    """Return the value of a JSON text as a type; raises Mismatch."""
    form = form_of(output_type)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        return form.read(value, ())
    except ValueError as error:
        raise Mismatch((), f"it is not JSON: {error}") from error
    except RecursionError:
        raise Mismatch((), "it is nested too deeply") from None


def form_of(output_type: object) -> Form:
    """Return the form of a type; raises TypeError, with the field's path, for one that has none here."""
    return _Forms().of(output_type, path=name_of(output_type))


def name_of(output_type: object) -> str:
    """Return what to call a type in messages."""
    is_class = isinstance(output_type, type) and not typing.get_args(output_type)
    return str(getattr(output_type, "__qualname__", output_type)) if is_class else str(output_type)


class _Forms:
    """The forms of one type and of what is in it."""

    def __init__(self) -> None:
        self._made: dict[object, Record | ModelForm] = {}
        self._within: set[object] = set()
        """The records and aliases that are being made: what meets one of them is within it."""
        self._names: set[str] = set()

    def of(self, annotation: object, *, path: str) -> Form:
        """Return the form of a type, which stands at a path such as "Trip.stops[]"."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            limits = [note for note in arguments[1:] if isinstance(note, Limits)]
            form = self.of(arguments[0], path=path)
            return _limited(form, limits[-1], annotation, path=path) if limits else form
        if isinstance(annotation, NewType):
            return self.of(annotation.__supertype__, path=path)
        if annotation is Any:
            return Anything()
        if origin is Literal:
            return _constants(arguments, annotation, path=path)
        if origin is Union or origin is types.UnionType:
            return OneOf(tuple(self.of(member, path=path) for member in arguments))
        if not arguments:
            return self._plain(annotation, path=path)
        if origin in _LISTS:
            return Items(self.of(arguments[0], path=f"{path}[]"), list)
        if origin is tuple and arguments[1:] == (...,):
            return Items(self.of(arguments[0], path=f"{path}[]"), tuple)
        if origin is tuple:
            return FixedItems(tuple(self.of(a, path=f"{path}[{i}]") for i, a in enumerate(arguments)))
        if origin in _MAPPINGS and arguments[0] is str:
            return Table(self.of(arguments[1], path=f"{path}{{}}"))
        return _refuse(annotation, path=path)

    def _plain(self, annotation: object, *, path: str) -> Form:
        """Return the form of a type that has no arguments."""
        for scalar, kind in _SCALARS:
            if annotation is scalar:
                return Scalar(kind)
        # An alias, as `type Name = ...` makes it from Python 3.12 on.
        alias: Any = annotation
        if type(annotation).__name__ == "TypeAliasType":
            return self._alias(alias, path=path)
        if isinstance(annotation, type):
            if issubclass(annotation, enum.Enum):
                return _constants(list(annotation), annotation, path=path)
            if hasattr(annotation, "model_json_schema") and hasattr(annotation, "model_validate_json"):
                return self._model(annotation, path=path)
            if typing.is_typeddict(annotation) or dataclasses.is_dataclass(annotation):
                return self._record(annotation, path=path)
        return _refuse(annotation, path=path)

    def _alias(self, alias: Any, *, path: str) -> Form:
        if alias in self._within:
            _refuse(alias, path=path)
        self._within.add(alias)
        form = self.of(alias.__value__, path=path)
        self._within.remove(alias)
        return form

    def _model(self, model: Any, *, path: str) -> Form:
        if model not in self._made:
            try:
                self._made[model] = ModelForm(self._name(model), model)
            except RuntimeError as error:
                # pydantic's own errors, such as PydanticInvalidForJsonSchema.
                raise TypeError(f"{path}: {error}") from error
        return self._made[model]

    def _record(self, of: Any, *, path: str) -> Form:
        known = self._made.get(of)
        if known is not None:
            if of in self._within and isinstance(known, Record):
                known.is_within_itself = True
            return known
        record = Record(self._name(of), dict if typing.is_typeddict(of) else of)
        self._made[of] = record
        self._within.add(of)
        for name, annotation, is_required in _members_of(of, path=path):
            record.properties[name] = Property(self.of(annotation, path=f"{path}.{name}"), is_required)
        self._within.remove(of)
        return record

    def _name(self, of: type) -> str:
        """Return a name for a type's definition that no other one has."""
        stem = re.sub(r"\W", "_", of.__name__)
        name, count = stem, 1
        while name in self._names:
            name, count = f"{stem}{count + 1}", count + 1
        self._names.add(name)
        return name


def _members_of(of: Any, *, path: str) -> Iterator[tuple[str, object, bool]]:
    """Yield name, type and whether it is required of each field of a dataclass or key of a TypedDict."""
    try:
        hints = typing.get_type_hints(of, localns={of.__name__: of}, include_extras=True)
    except NameError as error:
        raise TypeError(f"{path}: {error}; a type's fields must name what its module knows") from error
    if typing.is_typeddict(of):
        for name, hint in hints.items():
            origin = typing.get_origin(hint)
            if origin is Required or origin is NotRequired:
                yield name, typing.get_args(hint)[0], origin is Required
            else:
                yield name, hint, name in of.__required_keys__
        return
    fields = [field for field in dataclasses.fields(of) if field.init]
    parameters = inspect.signature(of).parameters
    for name in [field.name for field in fields if field.name not in parameters]:
        raise TypeError(f"{path}.{name}: {of.__name__}() does not take it")
    known = {field.name for field in fields}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in known:
            raise TypeError(f"{path}.{name}: {of.__name__}() takes it, and it is no field")
    for field in fields:
        has_default = field.default is not dataclasses.MISSING
        has_default = has_default or field.default_factory is not dataclasses.MISSING
        yield field.name, hints[field.name], not has_default


def _constants(values: Sequence[object], annotation: object, *, path: str) -> Form:
    choices: list[tuple[str | float | None, object]] = []
    for value in values:
        plain = value.value if isinstance(value, enum.Enum) else value
        if plain is not None and not isinstance(plain, str | int | float):
            raise TypeError(f"{path}: {value!r} is no constant of JSON")
        if isinstance(plain, float) and not math.isfinite(plain):
            raise TypeError(f"{path}: {value!r} is no number of JSON")
        choices.append((plain, value))
    return Constants(tuple(choices)) if choices else _refuse(annotation, path=path)


def _limited(form: Form, limits: Limits, annotation: object, *, path: str) -> Form:
    if not isinstance(form, Scalar | Items):
        raise TypeError(f"{path}: Limits are for str, int, float and lists, not for {name_of(annotation)}")
    limited = dataclasses.replace(form, limits=limits)
    try:
        limited.schema({})
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    return limited


def _refuse(annotation: object, *, path: str) -> NoReturn:
    raise TypeError(
        f"{path}: {name_of(annotation)} has no JSON schema here; give a str, int, float, bool, Enum, "
        "Literal, dataclass, TypedDict or pydantic model, or a list, tuple or dict[str, ...] of these"
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
