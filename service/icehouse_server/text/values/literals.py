"""Literals of JSON and Python, read as they arrive from a model and emitted as valid JSON.

Unambiguous mistakes are repaired; ambiguous ones are Malformed.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

import regex

from icehouse_server.text.values.text_source import SPACE, SPACES, Malformed, Reading, TextSource, read_whole

DEPTH_LIMIT = 200
"""Most brackets within brackets: the checks of a value recurse as deep."""

_WORD_LENGTH_LIMIT = 4300
"""Most characters of a number; Python refuses longer integers."""
_UNENDED = "the output ended inside a string"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_LETTERS = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]*")
_HEX = re.compile(r"[0-9A-Fa-f]")
_LITERALS = {"true": "true", "false": "false", "null": "null"}
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"{": "}", "[": "]", "(": ")"}

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
"""What follows a Python string, by the bracket around it: "f" for a call's, "" for none."""

Emit = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class JsonText:
    """Reads JSON values. `is_repaired` is set after any repair: of raw line breaks and tabs in strings, of a
    comma before a closing bracket, or of brackets that are still open before one of `ends`."""

    source: TextSource
    ends: tuple[str, ...] = ()
    is_python: bool = False
    """Whether True, False and None are literals too."""
    is_repaired: bool = False

    brackets: ClassVar = "{["
    may_end_with_comma: ClassVar = False
    """Whether a comma before a closing bracket is allowed."""

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
            raise Malformed("a string is missing where one is required")
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
                    raise Malformed("a string has an escape that JSON does not allow")
                digits += self.source.take(1)
            return f"\\u{digits}"
        if char not in '"\\/bfnrt':
            raise Malformed("a string has an escape that JSON does not allow")
        return f"\\{char}"

    def _between(self, stack: list[str], is_fresh: bool, emit: Emit) -> Reading[str | None]:
        """Read what comes before the next member and return it, or close brackets and return None."""
        closing = _CLOSING[stack[-1]]
        gap = yield from self.source.space()
        char = yield from self.source.peek()
        if not is_fresh and char == ",":
            self.source.take(1)
            behind = yield from self.source.space()
            char = yield from self.source.peek()
            if char and char != closing:
                return f"{gap},{behind}"
            self.is_repaired = self.is_repaired or not self.may_end_with_comma
            gap += behind
        if not char:
            raise Malformed("the output ended inside it")
        if char == closing:
            self.source.take(1)
            emit(gap + _end_of(stack.pop()))
            return None
        if is_fresh:
            return gap
        if not (yield from self.source.sees(*self.ends)):
            raise Malformed("a comma or a closing bracket is missing")
        self.is_repaired = True
        emit("".join(map(_end_of, reversed(stack))))
        stack.clear()
        return None

    def _key(self, emit: Emit) -> Reading[None]:
        yield from self.string(emit)
        gap = yield from self.source.space()
        if not (yield from self.source.accepts(":")):
            raise Malformed("a key has no value")
        emit(f"{gap}:")
        yield from self.source.run(SPACES, emit)

    def _begin(self, stack: list[str], emit: Emit) -> Reading[bool]:
        """Read a scalar, or the opening bracket of a list or object; return whether it is a bracket."""
        char = yield from self.source.peek()
        if not char or char not in self.brackets:
            yield from self._scalar(emit, char, "".join(stack[-1:]))
            return False
        if len(stack) >= DEPTH_LIMIT:
            raise Malformed(f"it is nested deeper than {DEPTH_LIMIT} brackets")
        stack.append(self.source.take(1))
        emit("{" if char == "{" else "[")
        return True

    def _scalar(self, emit: Emit, char: str, within: str) -> Reading[None]:
        """Read a scalar that begins with `char` ("" at the end) in the bracket `within` ("" for none)."""
        if char == '"':
            yield from self.string(emit)
        elif char and char in "-0123456789":
            number = yield from self.source.word(_NUMBER_LETTERS, limit=_WORD_LENGTH_LIMIT)
            if not _NUMBER.fullmatch(number):
                raise Malformed("it has a number that JSON does not allow")
            emit(number)
        else:
            yield from self._literal(emit, char)

    def _literal(self, emit: Emit, char: str) -> Reading[None]:
        if not char:
            raise Malformed("the output ended inside it")
        word = yield from self.source.word(_LETTERS, limit=_WORD_LENGTH_LIMIT)
        literals = _LITERALS | PYTHON_LITERALS if self.is_python else _LITERALS
        if word not in literals:
            raise Malformed(
                "it has a value that JSON does not allow" if word else "it is not JSON: a value is missing"
            )
        emit(literals[word])


def _end_of(opening: str) -> str:
    """Return JSON's closing bracket for an opening one."""
    return "}" if opening == "{" else "]"


@dataclasses.dataclass(slots=True)
class PythonText(JsonText):
    """Reads Python values. `is_repaired` is set after anything that is not Python.

    A quote ends a string only if structure follows it, since some templates write strings unescaped.
    """

    is_python: bool = True
    within: str = ""
    """What the value is inside of: "f" for the arguments of a call."""

    brackets: ClassVar = "{[("
    may_end_with_comma: ClassVar = True

    def string(self, emit: Emit, within: str = "{") -> Reading[None]:
        """Read a string inside the bracket `within`."""
        quote = yield from self.source.peek()
        if not quote or quote not in "\"'":
            raise Malformed("a key is not a string")
        emit(quoted((yield from self._string(within))))

    def _scalar(self, emit: Emit, char: str, within: str) -> Reading[None]:
        if char and char in "\"'":
            yield from self.string(emit, within or self.within)
        elif char and char in "-+.0123456789":
            emit((yield from self._number()))
        else:
            yield from self._literal(emit, char)

    def _number(self) -> Reading[str]:
        word = yield from self.source.word(_PYTHON_NUMBER_LETTERS, limit=_WORD_LENGTH_LIMIT)
        if _NUMBER.fullmatch(word):
            return word
        try:
            return json.dumps(ast.literal_eval(word), allow_nan=False)
        except (ValueError, SyntaxError, TypeError):
            raise Malformed("it has an invalid number") from None

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
        """Read on after a quote that two more follow: a triple-quoted string, or an empty one and a quote."""
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
        """Read what follows a backslash; return the character that the escape means."""
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
        raise ValueError("nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadValue:
    """The meaning of a whole text. `json_text` is its value as JSON, with numbers as they were written."""

    json_text: str
    is_repaired: bool = False


def tolerant(text: str, *, is_python: bool = False) -> ReadValue:
    """Return a whole text as JSON; raises Malformed."""
    return _whole(JsonText(TextSource(text.strip(SPACE), has_ended=True), is_python=is_python))


def python_literal(text: str) -> ReadValue:
    """Return a whole Python literal as JSON; raises Malformed."""
    return _whole(PythonText(TextSource(text.strip(), has_ended=True)))


def _whole(reader: JsonText) -> ReadValue:
    text = read_whole(reader.text())
    if reader.source.rest:
        raise Malformed("something follows the value")
    return ReadValue(text, reader.is_repaired)


def uniform(value: Any) -> Any:
    """Return a JSON value with sorted keys and whole numbers as integers: to many clients 1.0 is 1."""
    if isinstance(value, dict):
        return {key: uniform(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [uniform(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def quoted(text: str) -> str:
    """Return a string as JSON."""
    return json.dumps(text, ensure_ascii=False)


def sendable(text: str) -> str:
    """Return text that UTF-8 can encode: JSON can escape half of a surrogate pair, and models do."""
    return text.encode("utf-8", "replace").decode("utf-8")


def decoded(string: str) -> str:
    """Return the value of a JSON string."""
    return sendable(str(json.loads(string)))
