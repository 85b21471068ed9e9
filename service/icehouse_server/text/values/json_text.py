"""JSON text as models write it: read piece by piece, told as valid JSON, what is unambiguous repaired.

Repaired are raw line breaks and tabs in strings, a comma before a closing bracket, and, where the text that
ends the call follows, brackets that were not closed. What could mean two things is Malformed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from icehouse_server.text.values.source import Malformed, Reading, Source, read_whole

DEPTH_LIMIT = 200
"""Brackets within brackets: what checks the value descends with them."""

_WORD_LENGTH_LIMIT = 4300
"""Characters of a number; Python reads no longer integers."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_LETTERS = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]*")
_SPACES = re.compile(r"[ \t\r\n]*")
_HEX = re.compile(r"[0-9A-Fa-f]*")
_LITERALS = {"true", "false", "null"}
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]"}

Tell = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class JsonText:
    """A reader of one value after the other. `is_repaired` once anything was."""

    source: Source
    ends: tuple[str, ...] = ()
    """Where one of these follows a value, brackets that are still open are closed."""
    is_python: bool = False
    """True, False and None are literals too."""
    is_repaired: bool = False

    def value(self, tell: Tell) -> Reading[None]:
        """Read one value, telling it as it comes."""
        stack: list[str] = []
        is_fresh = yield from self._begin(stack, tell)
        while stack:
            before = yield from self._between(stack, is_fresh, tell)
            is_fresh = False
            if before is None:
                continue
            tell(before)
            if stack[-1] == "{":
                yield from self._key(tell)
            is_fresh = yield from self._begin(stack, tell)

    def text(self) -> Reading[str]:
        """Read one value; return it."""
        parts: list[str] = []
        yield from self.value(parts.append)
        return "".join(parts)

    def string(self, tell: Tell) -> Reading[None]:
        """Read a string, quotes included."""
        source = self.source
        if not (yield from source.accepts('"')):
            raise Malformed("a string is missing where one has to be")
        tell('"')
        while True:
            yield from source.run(_PLAIN, tell)
            char = yield from source.peek()
            if not char:
                raise Malformed("the output ended inside a string")
            source.take(1)
            if char == '"':
                tell(char)
                return
            if char == "\\":
                tell((yield from self._escape()))
            else:
                self.is_repaired = True
                tell(json.dumps(char)[1:-1])

    def _escape(self) -> Reading[str]:
        """Read what follows a backslash; return both."""
        char = yield from self.source.peek()
        if not char:
            raise Malformed("the output ended inside a string")
        self.source.take(1)
        if char == "'":
            self.is_repaired = True
            return char
        if char == "u":
            digits = ""
            while len(digits) < 4:
                digit = yield from self.source.peek()
                if not digit or not _HEX.fullmatch(digit):
                    raise Malformed("a string has an escape that JSON has not")
                digits += self.source.take(1)
            return f"\\u{digits}"
        if char not in '"\\/bfnrt':
            raise Malformed("a string has an escape that JSON has not")
        return f"\\{char}"

    def _between(self, stack: list[str], is_fresh: bool, tell: Tell) -> Reading[str | None]:
        """Read what stands before the next member and return it, or close brackets and return None."""
        closing = _CLOSING[stack[-1]]
        gap = yield from self.source.space()
        char = yield from self.source.peek()
        if not is_fresh and char == ",":
            self.source.take(1)
            behind = yield from self.source.space()
            char = yield from self.source.peek()
            if char and char != closing:
                return f"{gap},{behind}"
            self.is_repaired = True
            gap += behind
        if not char:
            raise Malformed("the output ended inside it")
        if char == closing:
            tell(gap + self.source.take(1))
            stack.pop()
            return None
        if is_fresh:
            return gap
        if not (yield from self.source.sees(*self.ends)):
            raise Malformed("it is no JSON: a comma or a closing bracket is missing")
        self.is_repaired = True
        tell("".join(_CLOSING[opening] for opening in reversed(stack)))
        stack.clear()
        return None

    def _key(self, tell: Tell) -> Reading[None]:
        yield from self.string(tell)
        gap = yield from self.source.space()
        if not (yield from self.source.accepts(":")):
            raise Malformed("it is no JSON: a key has no value")
        tell(f"{gap}:")
        yield from self.source.run(_SPACES, tell)

    def _begin(self, stack: list[str], tell: Tell) -> Reading[bool]:
        """Read a value that has no members, or the bracket that opens one; return whether it is a bracket."""
        char = yield from self.source.peek()
        if char and char in "{[":
            if len(stack) >= DEPTH_LIMIT:
                raise Malformed(f"it is nested deeper than {DEPTH_LIMIT} brackets")
            stack.append(self.source.take(1))
            tell(char)
            return True
        if char == '"':
            yield from self.string(tell)
        elif char and char in "-0123456789":
            number = yield from self.source.word(_NUMBER_LETTERS, limit=_WORD_LENGTH_LIMIT)
            if not _NUMBER.fullmatch(number):
                raise Malformed("it has a number that JSON has not")
            tell(number)
        else:
            yield from self._literal(tell, char)
        return False

    def _literal(self, tell: Tell, char: str) -> Reading[None]:
        if not char:
            raise Malformed("the output ended inside it")
        word = yield from self.source.word(_LETTERS, limit=_WORD_LENGTH_LIMIT)
        if word in _LITERALS:
            tell(word)
        elif self.is_python and word in PYTHON_LITERALS:
            tell(PYTHON_LITERALS[word])
        elif word:
            raise Malformed("it has a value that JSON has not")
        else:
            raise Malformed("it is no JSON: a value is missing")


def strict(text: str) -> Any:
    """Return the value of a text that is JSON and nothing else; raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def tolerant(text: str, *, is_python: bool = False) -> tuple[str, bool]:
    """Return the valid JSON that a whole text means, and whether it was repaired; raises Malformed."""
    source = Source(text, has_ended=True)
    reader = JsonText(source, is_python=is_python)

    def whole() -> Reading[str]:
        yield from source.space()
        found = yield from reader.text()
        yield from source.space()
        return found

    found = read_whole(whole())
    if source.rest:
        raise Malformed("it is no JSON: something follows the value")
    return found, reader.is_repaired


def quoted(text: str) -> str:
    """Return a string as JSON."""
    return json.dumps(text, ensure_ascii=False)
