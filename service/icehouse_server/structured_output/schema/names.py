"""Property names that a `propertyNames` allows: texts and patterns. Pure functions, any thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from icehouse_server.structured_output.schema.patterns import NAME_PATTERNS, without_look_around
from icehouse_server.structured_output.schema.references import References, UnusableSchema

_DEPTH_LIMIT = 16
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$id",
        "id",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Names that are allowed."""

    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    are_any: bool = False
    """Whether all others are allowed too."""
    unenforced: tuple[str, ...] = ()
    """Keywords that names are not held to, by their JSON pointers."""


def allowed_names(schema: Any, place: str, references: References, *, depth: int = 0) -> Names:
    """Return what a `propertyNames` at `place` allows; raises UnusableSchema."""
    if depth > _DEPTH_LIMIT:
        raise UnusableSchema(
            f"names are described by more than {_DEPTH_LIMIT} schemas within each other", place
        )
    if isinstance(schema, Mapping) and set(schema) - _ANNOTATIONS == {"$ref"}:
        target_place, target = references.target(schema["$ref"], place)
        return allowed_names(target, target_place, references, depth=depth + 1)
    if isinstance(schema, bool):
        return Names(are_any=schema)
    if not isinstance(schema, Mapping):
        raise UnusableSchema("a JSON schema is an object, true or false", place)
    said = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    kind = said.pop("type", "string")
    if set(said) == {"enum"} or set(said) == {"const"}:
        # Enums of numbers too, as names spell them: what pydantic makes of a dict by an IntEnum.
        texts = said["enum"] if "enum" in said else [said["const"]]
        return Names(texts=tuple(_spelled(texts)))
    for key in ("anyOf", "oneOf"):
        if set(said) == {key} and isinstance(said[key], list):
            options = enumerate(said[key])
            return _either(
                [allowed_names(s, f"{place}/{key}/{i}", references, depth=depth + 1) for i, s in options]
            )
    if kind != "string":
        raise UnusableSchema("names are strings: give their type as string, or an enum", f"{place}/type")
    return _patterned(said, place)


def _patterned(said: dict[str, Any], place: str) -> Names:
    """Return the names that one pattern, one known format or a length allows."""
    known = NAME_PATTERNS.get(str(said.get("format")))
    if known is not None and set(said) == {"format"}:
        return Names(patterns=(known,))
    unenforced = (f"{place}/format",) if said.pop("format", None) is not None else ()
    if not said:
        return Names(are_any=True, unenforced=unenforced)
    if set(said) == {"pattern"} and isinstance(said["pattern"], str):
        patterns = without_look_around(said["pattern"])
        if patterns is not None and len(patterns) == 1:
            return Names(patterns=patterns, unenforced=unenforced)
    elif set(said) <= {"minLength", "maxLength"} and all(type(v) is int and v >= 0 for v in said.values()):
        bounds = f"{said.get('minLength', 0)},{said.get('maxLength', '')}"
        return Names(patterns=(rf"^[\s\S]{{{bounds}}}$",), unenforced=unenforced)
    raise UnusableSchema(
        "names can be held to an enum, to one pattern without look-around or to a length, not to more", place
    )


def _either(options: list[Names]) -> Names:
    return Names(
        texts=tuple(text for names in options for text in names.texts),
        patterns=tuple(pattern for names in options for pattern in names.patterns),
        are_any=any(names.are_any for names in options),
        unenforced=tuple(place for names in options for place in names.unenforced),
    )


def _spelled(values: Any) -> list[str]:
    if not isinstance(values, list):
        return []
    return [str(v) for v in values if isinstance(v, str) or (isinstance(v, int) and not isinstance(v, bool))]
