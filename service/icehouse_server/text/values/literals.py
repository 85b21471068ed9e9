"""Literals of JSON and Python as models write them, read as they arrive and emitted as valid JSON.

Unambiguous mistakes are repaired; ambiguous ones are Malformed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import regex

from icehouse_server.text.values.text_source import SPACE, SPACES, Malformed, Reading, TextSource, read_whole

DEPTH_LIMIT = 200
"""Brackets within brackets: what checks the value descends with them."""

_WORD_LENGTH_LIMIT = 4300
"""Characters of a number; Python reads no longer integers."""
_UNENDED = "the output ended inside a string"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_LETTERS = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]*")
_HEX = re.compile(r"[0-9A-Fa-f]")
_LITERALS = {"true": "true", "false": "false", "null": "null"}
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]", "(": ")"}

_PYTHON_LETTERS = re.compile(r"[A-Za-z_]*")
_PYTHON_NUMBER_LETTERS = re.compile(r"[-+0-9.eE_]*")
_UNTIL_QUOTE = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_PYTHON_ESCAPES = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}
_DIGIT_COUNTS = {"x": 2, "u": 4, "U": 8}
_BEHIND_STRING = {
    "f": regex.compile(
        r"\s{0,200}(?:,\s{0,200}(?:[A-Za-z_]\w{0,200}\s{0,20}=(?!=)|\))|\)\s{0,200}(?:[\],;`<]|\w{1,200}\(|$))"
    ),
    "[": regex.compile(r"\s{0,200}[,\]]"),
    "(": regex.compile(r"\s{0,200}[,)]"),
    "{": regex.compile(r"\s{0,200}[,:}]"),
    "": regex.compile(r"\s{0,200}$"),
}
"""What follows the end of a Python string: by the bracket it stands in, "f" for a call's, "" for none."""

Emit = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class JsonText:
    """A reader of JSON values. `is_repaired` after any repair: of raw line breaks and tabs in strings, of a
    comma before a closing bracket, or of brackets that are not closed before one of `ends`."""

    source: TextSource
    ends: tuple[str, ...] = ()
    is_python: bool = False
    """True, False and None are literals too."""
    is_repaired: bool = False

    def value(self, emit: Emit) -> Reading[None]:
        """Read one value, emitting it as it arrives."""
        stack: list[str] = []
        is_fresh = yield from self._begin(stack, emit)
        while stack:
            before = yield from self._between(stack, is_fresh, emit)
            is_fresh = False
            if before is None:
                continue
            emit(before)
            if stack[-1] == "{":
                yield from self._key(emit)
            is_fresh = yield from self._begin(stack, emit)

    def text(self) -> Reading[str]:
        """Read one value; return it."""
        parts: list[str] = []
        yield from self.value(parts.append)
        return "".join(parts)

    def string(self, emit: Emit) -> Reading[None]:
        """Read a string, quotes included."""
        source = self.source
        if not (yield from source.accepts('"')):
            raise Malformed("a string is missing where one has to be")
        emit('"')
        while True:
            yield from source.run(_PLAIN, emit)
            char = yield from source.next(_UNENDED)
            if char == '"':
                emit(char)
                return
            if char == "\\":
                emit((yield from self._escape()))
            else:
                self.is_repaired = True
                emit(json.dumps(char)[1:-1])

    def _escape(self) -> Reading[str]:
        """Read what follows a backslash; return both."""
        char = yield from self.source.next(_UNENDED)
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

    def _between(self, stack: list[str], is_fresh: bool, emit: Emit) -> Reading[str | None]:
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
            emit(gap + self.source.take(1))
            stack.pop()
            return None
        if is_fresh:
            return gap
        if not (yield from self.source.sees(*self.ends)):
            raise Malformed("it is no JSON: a comma or a closing bracket is missing")
        self.is_repaired = True
        emit("".join(_CLOSING[opening] for opening in reversed(stack)))
        stack.clear()
        return None

    def _key(self, emit: Emit) -> Reading[None]:
        yield from self.string(emit)
        gap = yield from self.source.space()
        if not (yield from self.source.accepts(":")):
            raise Malformed("it is no JSON: a key has no value")
        emit(f"{gap}:")
        yield from self.source.run(SPACES, emit)

    def _begin(self, stack: list[str], emit: Emit) -> Reading[bool]:
        """Read a value that has no members, or the bracket that opens one; return whether it is a bracket."""
        char = yield from self.source.peek()
        if char and char in "{[":
            if len(stack) >= DEPTH_LIMIT:
                raise Malformed(f"it is nested deeper than {DEPTH_LIMIT} brackets")
            stack.append(self.source.take(1))
            emit(char)
            return True
        if char == '"':
            yield from self.string(emit)
        elif char and char in "-0123456789":
            number = yield from self.source.word(_NUMBER_LETTERS, limit=_WORD_LENGTH_LIMIT)
            if not _NUMBER.fullmatch(number):
                raise Malformed("it has a number that JSON has not")
            emit(number)
        else:
            yield from self._literal(emit, char)
        return False

    def _literal(self, emit: Emit, char: str) -> Reading[None]:
        if not char:
            raise Malformed("the output ended inside it")
        word = yield from self.source.word(_LETTERS, limit=_WORD_LENGTH_LIMIT)
        literals = _LITERALS | PYTHON_LITERALS if self.is_python else _LITERALS
        if word not in literals:
            raise Malformed(
                "it has a value that JSON has not" if word else "it is no JSON: a value is missing"
            )
        emit(literals[word])


@dataclasses.dataclass(slots=True)
class PythonText:
    """A reader of Python values. `is_repaired` after anything that is not Python.

    A quote ends a string only where structure follows it, since some templates write strings unescaped.
    """

    source: TextSource
    is_repaired: bool = False

    def value(self, emit: Emit, *, within: str, depth: int = 0) -> Reading[None]:
        """Read one value; `within` is the bracket it stands in."""
        if depth > DEPTH_LIMIT:
            raise Malformed(f"it is nested deeper than {DEPTH_LIMIT} brackets")
        char = yield from self.source.peek()
        if not char:
            raise Malformed("the output ended inside it")
        if char in "\"'":
            emit(quoted((yield from self._string(within))))
        elif char in _CLOSING:
            yield from self._members(emit, depth)
        elif char in "-+.0123456789":
            emit((yield from self._number()))
        else:
            word = yield from self.source.word(_PYTHON_LETTERS, limit=_WORD_LENGTH_LIMIT)
            literals = _LITERALS | PYTHON_LITERALS
            if word not in literals:
                raise Malformed("it has a value that is no literal")
            emit(literals[word])

    def _members(self, emit: Emit, depth: int) -> Reading[None]:
        source = self.source
        opening = source.take(1)
        closing = _CLOSING[opening]
        emit("{" if opening == "{" else "[")
        is_first = True
        while True:
            yield from source.space()
            if (yield from source.accepts(closing)):
                emit("}" if opening == "{" else "]")
                return
            emit("" if is_first else ", ")
            is_first = False
            if opening == "{":
                yield from self._key(emit)
            yield from self.value(emit, within=opening, depth=depth + 1)
            yield from source.space()
            if not (yield from source.accepts(",")) and not (yield from source.sees(closing)):
                raise Malformed("a comma or a closing bracket is missing")

    def _key(self, emit: Emit) -> Reading[None]:
        char = yield from self.source.peek()
        if not char or char not in "\"'":
            raise Malformed("a key is no string")
        emit(quoted((yield from self._string("{"))))
        yield from self.source.space()
        if not (yield from self.source.accepts(":")):
            raise Malformed("a key has no value")
        emit(": ")
        yield from self.source.space()

    def _number(self) -> Reading[str]:
        word = yield from self.source.word(_PYTHON_NUMBER_LETTERS, limit=_WORD_LENGTH_LIMIT)
        if _NUMBER.fullmatch(word):
            return word
        try:
            return json.dumps(ast.literal_eval(word), allow_nan=False)
        except (ValueError, SyntaxError, TypeError):
            raise Malformed("it has a number that is none") from None

    def _string(self, within: str) -> Reading[str]:
        source = self.source
        quote = source.take(1)
        if (yield from source.sees(quote * 2)):
            return (yield from self._after_two_quotes(quote, within))
        parts: list[str] = []
        while True:
            yield from source.run(_UNTIL_QUOTE[quote], parts.append)
            char = yield from source.next(_UNENDED)
            if char == "\\":
                parts.append((yield from self._escape()))
            elif (yield from source.ahead(_BEHIND_STRING[within])) is not None:
                return "".join(parts)
            else:
                self.is_repaired = True
                parts.append(char)

    def _after_two_quotes(self, quote: str, within: str) -> Reading[str]:
        """Read on before two more quotes: of a triple-quoted string, or an empty string and a quote."""
        source = self.source
        source.take(2)
        parts: list[str] = []
        while True:
            marker = yield from source.until((quote * 3, "\\"), parts.append)
            if not marker:
                raise Malformed(_UNENDED)
            if marker == "\\":
                parts.append((yield from self._escape()))
            elif (yield from source.ahead(_BEHIND_STRING[within])) is not None:
                return "".join(parts)
            else:
                parts.append(quote)
                source.put_back(quote * 2)

    def _escape(self) -> Reading[str]:
        """Read what follows a backslash; return what both mean."""
        char = yield from self.source.next(_UNENDED)
        if char in _DIGIT_COUNTS:
            count = _DIGIT_COUNTS[char]
            match = yield from self.source.ahead(
                regex.compile(rf"[0-9A-Fa-f]{{{count}}}(?=.|$)", regex.DOTALL)
            )
            if match is None or int(match[0], 16) > 0x10FFFF:
                return f"\\{char}"
            return sendable(chr(int(self.source.take(count), 16)))
        return _PYTHON_ESCAPES.get(char, f"\\{char}")


def strict(text: str) -> Any:
    """Return the value of a text that is JSON and nothing else; raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadValue:
    """The meaning of a whole text: `json_text` is the value as JSON, with numbers as they were written."""

    json_text: str
    is_repaired: bool = False


def tolerant(text: str, *, is_python: bool = False) -> ReadValue:
    """Return a whole text as JSON; raises Malformed."""
    reader, parts = JsonText(TextSource(text.strip(SPACE), has_ended=True), is_python=is_python), list[str]()
    return _whole(reader, reader.value(parts.append), parts)


def python_literal(text: str) -> ReadValue:
    """Return a whole Python literal as JSON; raises Malformed."""
    reader, parts = PythonText(TextSource(text.strip(), has_ended=True)), list[str]()
    return _whole(reader, reader.value(parts.append, within=""), parts)


def _whole(reader: JsonText | PythonText, reading: Reading[None], parts: Sequence[str]) -> ReadValue:
    read_whole(reading)
    if reader.source.rest:
        raise Malformed("something follows the value")
    return ReadValue("".join(parts), reader.is_repaired)


def quoted(text: str) -> str:
    """Return a string as JSON."""
    return json.dumps(text, ensure_ascii=False)


def sendable(text: str) -> str:
    """Return text that UTF-8 can encode: JSON can escape half of a surrogate pair, and models do."""
    return text.encode("utf-8", "replace").decode("utf-8")


def decoded(string: str) -> str:
    """Return the value of a JSON string."""
    return sendable(str(json.loads(string)))
