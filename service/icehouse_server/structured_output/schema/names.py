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
    """Names that are allowed, and no others."""

    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


def allowed_names(schema: Any, place: str, references: References, *, depth: int = 0) -> Names | None:
    """Return what a `propertyNames` at `place` allows; None for any name. Raises UnusableSchema."""
    if depth > _DEPTH_LIMIT:
        raise UnusableSchema(
            f"names are described by more than {_DEPTH_LIMIT} schemas within each other", place
        )
    if isinstance(schema, Mapping) and set(schema) - _ANNOTATIONS == {"$ref"}:
        target_place, target = references.target(schema["$ref"], place)
        return allowed_names(target, target_place, references, depth=depth + 1)
    if isinstance(schema, bool):
        return None if schema else Names()
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


def _patterned(said: dict[str, Any], place: str) -> Names | None:
    """Return the names that one pattern, one known format or a length allows."""
    # A format says no more here than the pattern that stands beside it.
    known = NAME_PATTERNS.get(str(said.pop("format", "")))
    if known is not None and not said:
        return Names(patterns=(known,))
    if not said:
        return None
    if set(said) == {"pattern"} and isinstance(said["pattern"], str):
        patterns = without_look_around(said["pattern"])
        if patterns is not None and len(patterns) == 1:
            return Names(patterns=patterns)
    elif set(said) <= {"minLength", "maxLength"} and all(type(v) is int and v >= 0 for v in said.values()):
        bounds = f"{said.get('minLength', 0)},{said.get('maxLength', '')}"
        return Names(patterns=(rf"^[\s\S]{{{bounds}}}$",))
    raise UnusableSchema(
        "names can be held to an enum, to one pattern without look-around or to a length, not to more", place
    )


def _either(options: list[Names | None]) -> Names | None:
    known = [option for option in options if option is not None]
    if len(known) < len(options):
        return None
    texts = tuple(text for names in known for text in names.texts)
    return Names(texts, tuple(pattern for names in known for pattern in names.patterns))


def _spelled(values: Any) -> list[str]:
    if not isinstance(values, list):
        return []
    return [str(v) for v in values if isinstance(v, str) or (isinstance(v, int) and not isinstance(v, bool))]
