"""Output types: the JSON schema of a Python type, and outputs read into it, both pydantic's.

A type is whatever pydantic (2.9 or newer) knows: its own models, dataclasses, TypedDicts, enums, literals,
lists, dicts, unions. The client needs pydantic for nothing else, so it is imported when a type comes.
"""

from __future__ import annotations

import importlib
from typing import Any

from icehouse_client.formats import json_schema
from icehouse_client.requests import Options


class Mismatch(ValueError):
    """A text that is no value of a type, with what is wrong and where."""


def schema_of(output_type: object) -> dict[str, Any]:
    """Return the JSON schema of a type, for a response format.

    Objects have nothing beside their fields, unless the type itself says so. Raises TypeError for a type that
    has no schema, and ImportError where pydantic is not installed.
    """
    adapter = _adapter_of(output_type)
    try:
        schema = adapter.json_schema()
    except _pydantic().PydanticUserError as error:
        raise _refusal(output_type, error) from error
    return dict(_closed(schema))


def typed_options(options: Options, output_type: object) -> Options:
    """Return a request's options that hold its output to a type; a format of the caller's own is kept."""
    schema = schema_of(output_type)
    if "response_format" in options:
        return options
    return {**options, "response_format": json_schema(schema)}


def read_json(text: str, output_type: object) -> Any:
    """Return the value of a JSON text as a type; raises Mismatch."""
    adapter = _adapter_of(output_type)
    try:
        return adapter.validate_json(text)
    except ValueError as error:
        raise Mismatch(str(error)) from error


def name_of(output_type: object) -> str:
    """Return what to call a type in messages."""
    return str(getattr(output_type, "__qualname__", output_type))


def _adapter_of(output_type: object) -> Any:
    pydantic = _pydantic()
    try:
        return pydantic.TypeAdapter(output_type)
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as error:
        raise _refusal(output_type, error) from error


def _pydantic() -> Any:
    try:
        return importlib.import_module("pydantic")
    except ImportError as error:
        message = "reading outputs into types needs pydantic: pip install pydantic"
        raise ImportError(message) from error


def _refusal(output_type: object, error: Exception) -> TypeError:
    return TypeError(f"{name_of(output_type)} has no JSON schema: {error}")


def _closed(schema: Any) -> Any:
    """Return a schema whose objects with known properties have no others, where it does not say of them."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {keyword: _closed(value) for keyword, value in schema.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
