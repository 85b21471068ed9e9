"""References of a schema: what a `$ref` points to, inside the same document. Pure functions, any thread."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from icehouse_server.errors import clipped

_SHOWN_LENGTH = 80


class FormMistake(ValueError):
    """What is wrong with a form, and where: a JSON pointer, "line 2, column 5", or "" if unknown."""

    def __init__(self, detail: str, position: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.position = position


class UnusableSchema(FormMistake):
    """A schema that cannot be enforced: what is wrong with it, and at which JSON pointer."""

    def __init__(self, detail: str, pointer: str) -> None:
        super().__init__(detail, pointer or "/")


class References:
    """Looks up the references of one document; nothing is ever fetched."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._own_name = _text(document, "$id").partition("#")[0]
        self._anchors: dict[str, str] | None = None

    def target(self, reference: Any, pointer: str) -> tuple[str, Any]:
        """Return the JSON pointer that a `$ref` at `pointer` refers to, and the schema there."""
        if not isinstance(reference, str):
            raise UnusableSchema("$ref must be a string", f"{pointer}/$ref")
        document, _, fragment = reference.partition("#")
        shown = clipped(reference, _SHOWN_LENGTH)
        if document and document != self._own_name:
            raise UnusableSchema(
                f"$ref {shown} is in another document, which is not fetched; put it into $defs",
                f"{pointer}/$ref",
            )
        target_pointer = self._pointer(fragment)
        target = None if target_pointer is None else self._at(target_pointer)
        if target is None:
            raise UnusableSchema(f"$ref {shown} points to no schema", f"{pointer}/$ref")
        return target

    def _pointer(self, fragment: str) -> str | None:
        if not fragment or fragment.startswith("/"):
            return fragment.rstrip("/") if fragment == "/" else fragment
        if self._anchors is None:
            self._anchors = _anchors(self._document)
        return self._anchors.get(urllib.parse.unquote(fragment))

    def _at(self, target_pointer: str) -> tuple[str, Any] | None:
        part, pointer = self._document, ""
        for step in target_pointer.split("/")[1:]:
            key = _key(part, step)
            if key is None:
                return None
            part, pointer = part[key], f"{pointer}/{escaped(str(key))}"
        return (pointer, part) if isinstance(part, Mapping | bool) else None


def parts_of(document: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of a JSON document, each with its pointer, the document's own first."""
    remaining = [("", document)]
    while remaining:
        pointer, part = remaining.pop()
        if isinstance(part, Mapping):
            yield pointer, part
        children = part.items() if isinstance(part, Mapping) else enumerate(part)
        remaining += [
            (f"{pointer}/{escaped(str(k))}", v) for k, v in children if isinstance(v, Mapping | list)
        ]


def escaped(name: str) -> str:
    """Return a name as RFC 6901 escapes it in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _key(part: Any, step: str) -> str | int | None:
    """Return the key that a step of a pointer names; not all libraries encode pointers as RFC 6901 says."""
    if isinstance(part, list):
        return int(step) if step.isascii() and step.isdecimal() and int(step) < len(part) else None
    if not isinstance(part, Mapping):
        return None
    decoded = urllib.parse.unquote(step)
    spellings = [step, *(each.replace("~1", "/").replace("~0", "~") for each in (step, decoded))]
    return next((spelling for spelling in spellings if spelling in part), None)


def _anchors(document: Any) -> dict[str, str]:
    anchors: dict[str, str] = {}
    for pointer, part in parts_of(document):
        if anchor := _text(part, "$anchor"):
            anchors.setdefault(anchor, pointer)
    return anchors


def _text(part: Any, key: str) -> str:
    value = part.get(key) if isinstance(part, Mapping) else None
    return value if isinstance(value, str) else ""
