"""Fields of a request's JSON: readers that refuse a wrong value with the path of its field.

A field that is null counts as not there, and fields that nobody asks for are ignored, as OpenAI's and
Anthropic's own servers do.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from icehouse_http.errors import ApiError, bad_request

INT32_MAX: Final = (1 << 31) - 1
_NO_LIMIT = 1 << 62
_MOST_OBJECTS = 4096
"""Turns, tools or parts. Each is read for tens of microseconds, and nobody else is answered meanwhile."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a surrogate pair, as JSON escapes it."""
_SHOWN = 60
"""Characters of a wrong value that its refusal repeats."""


class Fields:
    """One JSON object and where it is in the request: `place` is empty for the request itself."""

    def __init__(self, value: object, place: str = "") -> None:
        if not isinstance(value, dict):
            raise bad_request(f"{place or 'the body'} must be a JSON object, not {_kind(value)}", param=place)
        self._values: Mapping[str, Any] = value
        self._place = place

    @property
    def place(self) -> str:
        """The path of the object, such as `messages[0]`."""
        return self._place

    def place_of(self, name: str) -> str:
        """Return the path of a field, such as `messages[0].content`."""
        return f"{self._place}.{name}" if self._place else name

    def raw(self, name: str) -> Any:
        """Return whatever a field has; None where it is not there."""
        return self._values.get(name)

    def refusal(self, name: str, problem: str) -> ApiError:
        """Return the error that says what is wrong with a field."""
        place = self.place_of(name)
        return bad_request(f"{place} {problem}", param=place)

    def require(self, name: str) -> None:
        """Raise ApiError where a field is not there."""
        if self.raw(name) is None:
            raise self.refusal(name, "is required")

    def text(self, name: str, default: str = "") -> str:
        """Return a text."""
        value = self.raw(name)
        if value is None:
            return default
        return value if isinstance(value, str) else self._refuse(name, "a string")

    def required_text(self, name: str) -> str:
        """Return a text that must be there and not be empty."""
        text = self.text(name)
        if not text:
            raise self.refusal(name, "is required")
        return text

    def one_of(self, name: str, *known: str, default: str) -> str:
        """Return a word of those that are known."""
        word = self.text(name, default)
        if word not in known:
            raise self.refusal(name, f"is {_shown(word)}; it must be one of {', '.join(known)}")
        return word

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self.raw(name)
        if value is None:
            return default
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def integer(self, name: str, *, least: int, most: int) -> int | None:
        """Return a whole number of a range; None where it is not there."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(name, "a whole number")
        if not least <= value <= most:
            wanted = f"{least} or more" if most >= _NO_LIMIT else f"from {least} to {most}"
            raise self.refusal(name, f"is {_shown(value)}; it must be {wanted}")
        return int(value)

    def token_limit(self, name: str, *, least: int = 1) -> int | None:
        """Return a number of tokens; the server lowers what is above its own limit."""
        value = self.integer(name, least=least, most=_NO_LIMIT)
        return None if value is None else min(value, INT32_MAX)

    def number(self, name: str) -> float | None:
        """Return a number; the server knows the ranges."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(name, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.refusal(name, "is too large")
        return number

    def object(self, name: str) -> Fields | None:
        """Return the fields of an object; None where it is not there."""
        value = self.raw(name)
        return None if value is None else Fields(value, self.place_of(name))

    def required_object(self, name: str) -> Fields:
        """Return the fields of an object that must be there."""
        self.require(name)
        return Fields(self.raw(name), self.place_of(name))

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Return an object as it is; None where it is not there."""
        value = self.raw(name)
        if value is None:
            return None
        return value if isinstance(value, dict) else self._refuse(name, "an object")

    def items(self, name: str) -> list[Any]:
        """Return a list, empty where it is not there."""
        value = self.raw(name)
        if value is None:
            return []
        return value if isinstance(value, list) else self._refuse(name, "a list")

    def objects(self, name: str) -> Iterator[Fields]:
        """Iterate over the objects of a list; raises ApiError for more than can be read at once."""
        items = self.items(name)
        if len(items) > _MOST_OBJECTS:
            raise self.refusal(name, f"has {len(items)} entries; the limit is {_MOST_OBJECTS}")
        for index, item in enumerate(items):
            yield Fields(item, f"{self.place_of(name)}[{index}]")

    def texts(self, name: str) -> list[str]:
        """Return the texts of a list; one text alone is a list of it."""
        value = self.raw(name)
        if isinstance(value, str):
            return [value]
        if value is not None and not is_list_of(value, str):
            self._refuse(name, "a string or a list of strings")
        return value or []

    def parts(self, name: str) -> Iterator[Fields]:
        """Iterate over content: a text alone is one part of it."""
        value = self.raw(name)
        if isinstance(value, str):
            yield Fields({"type": "text", "text": value}, self.place_of(name))
        elif value is not None and not isinstance(value, list):
            self._refuse(name, "a string or a list of parts")
        else:
            yield from self.objects(name)

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise self.refusal(name, f"must be {wanted}, not {_kind(self.raw(name))}")


def is_list_of(value: object, kind: type) -> bool:
    """Whether this is a list with only such entries; true and false are no numbers."""
    return isinstance(value, Sequence) and all(type(item) is kind for item in value)


def fields_of(body: bytes) -> Fields:
    """Return the fields of a request's body; raises ApiError for what is no JSON object."""
    try:
        text = body.decode("utf-8-sig")
        with _uncollected():
            value = json.loads(text, parse_constant=_refuse_constant)
            if _SURROGATE.search(text):
                # Half of a pair can be neither sent on nor told again, whichever field has it.
                json.dumps(value, ensure_ascii=False).encode()
        return Fields(value)
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: of a parser's values none is, and each search would go through them all.
    A body of a megabyte of lists held the event loop four times as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
