"""Patterns, formats and property names, written as patterns without look-around. Pure functions, any thread.

A grammar can hold a string to several patterns at once, so each look-ahead at the start of a pattern becomes
a pattern of its own. Other look-around is enforced only in well-known patterns, listed here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from icehouse_server.structured_output.schema.references import References, UnusableSchema

GRAMMAR_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Formats that llguidance enforces."""

_HEX = "[0-9a-fA-F]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NETWORK = rf"^(?:{_BYTE}\.){{3}}{_BYTE}(?:/(?:3[0-2]|[12]?[0-9]))?$"
_DAY = r"(?:0[1-9]|[12][0-9]|3[01])"
_BASE64 = "[0-9a-zA-Z+/]"
_BASE64URL = "[0-9a-zA-Z_-]"

FORMAT_PATTERNS = {
    **{
        f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
        for version in range(1, 9)
    },
    "base64": f"^(?:{_BASE64}{{4}})*(?:{_BASE64}{{2}}==|{_BASE64}{{3}}=)?$",
    "base64url": f"^(?:{_BASE64URL}{{4}})*(?:{_BASE64URL}{{2}}(?:==)?|{_BASE64URL}{{3}}=?)?$",
    "ipv4network": _NETWORK,
    "ipv4interface": _NETWORK,
}
"""Further formats that pydantic writes, as patterns."""

NAME_PATTERNS = {
    **{name: pattern for name, pattern in FORMAT_PATTERNS.items() if name.startswith("uuid")},
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "date": rf"^[0-9]{{4}}-(?:0[1-9]|1[0-2])-{_DAY}$",
    "ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$",
}
"""Formats of property names as patterns: for names, llguidance supports only patterns."""

_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_DURATION = rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"

_KNOWN = {
    # zod's duration.
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": _DURATION,
    # pydantic's Decimal, before 2.13.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
_ZOD_EMAIL = re.compile(
    r"\^\(\?!\\\.\)\(\?!\.\*\\\.\\\.\)\((\[[^\]]*)\\\.\]\*\)(\[[^\]]*\])@(.*)\$", re.DOTALL
)
"""`^(?!\\.)(?!.*\\.\\.)([…\\.]*)[…]@…$`, zod's email: no dot first, and no two in a row."""
_DECIMAL_HEAD = r"^(?!^[-+.]*$)[+-]?0*"
_DECIMAL_PLACES = re.compile(r"\\d\*\\\.\?\\d\{0,(\d{1,3})\}0\*\$")
_DECIMAL_DIGITS = re.compile(
    r"\(\?:\\d\{0,(\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(\d{1,3})\}0\*\$\)"
    r"\\d(?:\*|\{0,\d{1,3}\})\\\.\\d(?:\*|\{0,(\d{1,3})\})0\*\$\)"
)

_DEPTH_LIMIT = 16
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$id", "id"}
)

_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_LOOK_AHEAD = _LOOK_AROUND[0]


def without_look_around(pattern: str) -> tuple[str, ...] | None:
    """Return patterns that together match the same; None for look-around that cannot be enforced."""
    if not _looks_around(pattern):
        return (pattern,)
    known = _KNOWN.get(pattern) or _email(pattern)
    if known is not None:
        return (known,)
    if pattern.startswith(_DECIMAL_HEAD):
        return _decimal(pattern.removeprefix(_DECIMAL_HEAD))
    return _split(pattern)


def _email(pattern: str) -> str | None:
    match = _ZOD_EMAIL.fullmatch(pattern)
    if match is None:
        return None
    letter, last, domain = f"{match[1]}]", match[2], match[3]
    # If the domain may begin with a dot or have two in a row, this would allow more than the original.
    if not domain.startswith("([") or "." in domain.replace(r"\.)+", "", 1):
        return None
    return rf"^(?:{letter}+\.)*{letter}*{last}@{domain}$"


def _decimal(rest: str) -> tuple[str, ...] | None:
    """Return patterns for pydantic's Decimal with a bound on digits or decimal places, before 2.13."""
    a_digit = r"^[+-]?\.?\d"
    places = _DECIMAL_PLACES.fullmatch(rest)
    if places is not None:
        return (a_digit, rf"^[+-]?\d*\.?\d{{0,{places[1]}}}0*$")
    digits = _DECIMAL_DIGITS.fullmatch(rest)
    if digits is None:
        return None
    whole, both, behind = digits[1], digits[2], digits[3]
    fraction = r"\d*" if behind is None else rf"\d{{0,{behind}}}"
    left = r"\d*" if behind is None else rf"\d{{0,{whole}}}"
    return (
        a_digit,
        rf"^[+-]?0*(?:\d{{0,{whole}}}|{left}\.{fraction}0*)$",
        rf"^[+-]?0*(?:\d{{0,{whole}}}|[\d.]{{1,{both}}}0*)$",
    )


def _split(pattern: str) -> tuple[str, ...] | None:
    """Return the parts of a pattern that begins with `^(?=…)(?=…)`: each look-ahead, then the rest."""
    if not pattern.startswith("^"):
        return None
    rest, parts = pattern[1:], []
    while rest.startswith(_LOOK_AHEAD):
        closings = (index for index, character, depth in _depths(rest) if character == ")" and not depth)
        if (end := next(closings, None)) is None:
            return None
        parts.append(f"^(?:{rest[len(_LOOK_AHEAD) : end]})")
        rest = rest[end + 1 :]
    parts.append(f"^{rest}")
    has_alternatives = any(character == "|" and not depth for _, character, depth in _depths(rest))
    if any(map(_looks_around, parts)) or has_alternatives:
        return None
    return tuple(parts)


def _depths(pattern: str) -> list[tuple[int, str, int]]:
    """Return each parenthesis and bar that is not a literal: its index, the character and its depth."""
    depths: list[tuple[int, str, int]] = []
    depth, in_class, is_escaped = 0, False, False
    for index, character in enumerate(pattern):
        if is_escaped or character == "\\":
            is_escaped = not is_escaped
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "(|)":
            depth += {"(": 1, "|": 0, ")": -1}[character]
            depths.append((index, character, depth))
    return depths


def _looks_around(pattern: str) -> bool:
    if not any(sign in pattern for sign in _LOOK_AROUND):
        return False
    groups = (index for index, character, _ in _depths(pattern) if character == "(")
    return any(pattern.startswith(_LOOK_AROUND, index) for index in groups)


@dataclasses.dataclass(frozen=True, slots=True)
class PropertyNames:
    """The property names that an object may have."""

    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    are_any: bool = False
    """Whether all other names are allowed too."""
    unenforced: tuple[str, ...] = ()
    """JSON pointers of keywords that are not enforced."""


def allowed_names(schema: Any, pointer: str, references: References, *, depth: int = 0) -> PropertyNames:
    """Return what a `propertyNames` at `pointer` allows; raises UnusableSchema."""
    if depth > _DEPTH_LIMIT:
        raise UnusableSchema(
            f"property names are described by more than {_DEPTH_LIMIT} nested schemas", pointer
        )
    if isinstance(schema, Mapping) and set(schema) - _ANNOTATIONS == {"$ref"}:
        target_pointer, target = references.target(schema["$ref"], pointer)
        return allowed_names(target, target_pointer, references, depth=depth + 1)
    if isinstance(schema, bool):
        return PropertyNames(are_any=schema)
    if not isinstance(schema, Mapping):
        raise UnusableSchema("a JSON schema must be an object, true or false", pointer)
    keywords = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    kind = keywords.pop("type", "string")
    if set(keywords) == {"enum"} or set(keywords) == {"const"}:
        # Enums of numbers too, spelled as names: pydantic writes them for a dict with IntEnum keys.
        texts = keywords["enum"] if "enum" in keywords else [keywords["const"]]
        return PropertyNames(texts=tuple(_spelled(texts)))
    for key in ("anyOf", "oneOf"):
        if set(keywords) == {key} and isinstance(keywords[key], list):
            options = enumerate(keywords[key])
            return _either(
                [allowed_names(s, f"{pointer}/{key}/{i}", references, depth=depth + 1) for i, s in options]
            )
    if kind != "string":
        raise UnusableSchema("property names are strings: use the type string, or an enum", f"{pointer}/type")
    return _patterned(keywords, pointer)


def _patterned(keywords: dict[str, Any], pointer: str) -> PropertyNames:
    """Return the names that one pattern, one known format or a length limit allows."""
    known = NAME_PATTERNS.get(str(keywords.get("format")))
    if known is not None and set(keywords) == {"format"}:
        return PropertyNames(patterns=(known,))
    unenforced = (f"{pointer}/format",) if keywords.pop("format", None) is not None else ()
    if not keywords:
        return PropertyNames(are_any=True, unenforced=unenforced)
    if set(keywords) == {"pattern"} and isinstance(keywords["pattern"], str):
        patterns = without_look_around(keywords["pattern"])
        if patterns is not None and len(patterns) == 1:
            return PropertyNames(patterns=patterns, unenforced=unenforced)
    elif set(keywords) <= {"minLength", "maxLength"} and all(
        type(v) is int and v >= 0 for v in keywords.values()
    ):
        bounds = f"{keywords.get('minLength', 0)},{keywords.get('maxLength', '')}"
        return PropertyNames(patterns=(rf"^[\s\S]{{{bounds}}}$",), unenforced=unenforced)
    raise UnusableSchema(
        "property names can have an enum, one pattern without look-around or a length, not several",
        pointer,
    )


def _either(options: list[PropertyNames]) -> PropertyNames:
    return PropertyNames(
        texts=tuple(text for names in options for text in names.texts),
        patterns=tuple(pattern for names in options for pattern in names.patterns),
        are_any=any(names.are_any for names in options),
        unenforced=tuple(pointer for names in options for pointer in names.unenforced),
    )


def _spelled(values: Any) -> list[str]:
    if not isinstance(values, list):
        return []
    return [str(v) for v in values if isinstance(v, str) or (isinstance(v, int) and not isinstance(v, bool))]
