"""Python literals as models write them in calls such as `f(city="Oslo", days=2)`: read piece by piece, told
as JSON.

A quote ends a string only where structure follows it: some templates write strings as they are, so that
quotes inside of one look like its end.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re

import regex

from icehouse_server.text.values.json_text import DEPTH_LIMIT, Tell, quoted
from icehouse_server.text.values.source import Malformed, Reading, Source, read_whole

_WORD_LENGTH_LIMIT = 4300
_LETTERS = re.compile(r"[A-Za-z_]*")
_NUMBER_LETTERS = re.compile(r"[-+0-9.eE_]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LITERALS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_UNTIL = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_SIMPLE_ESCAPES = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}
_DIGIT_COUNTS = {"x": 2, "u": 4, "U": 8}

# What follows the end of a string: by the bracket that it stands in, "" for none, "f" for a call's.
_BEHIND = {
    "f": regex.compile(
        r"\s{0,200}(?:,\s{0,200}(?:[A-Za-z_]\w{0,200}\s{0,20}=(?!=)|\))|\)\s{0,200}(?:[\],;`<]|\w{1,200}\(|$))"
    ),
    "[": regex.compile(r"\s{0,200}[,\]]"),
    "(": regex.compile(r"\s{0,200}[,)]"),
    "{": regex.compile(r"\s{0,200}[,:}]"),
    "": regex.compile(r"\s{0,200}$"),
}


@dataclasses.dataclass(slots=True)
class PythonText:
    """A reader of one value after the other. `is_repaired` once anything was that Python would not take."""

    source: Source
    is_repaired: bool = False

    def value(self, tell: Tell, *, within: str, depth: int = 0) -> Reading[None]:
        """Read one value; `within` is the bracket it stands in."""
        if depth > DEPTH_LIMIT:
            raise Malformed(f"it is nested deeper than {DEPTH_LIMIT} brackets")
        char = yield from self.source.peek()
        if not char:
            raise Malformed("the output ended inside it")
        if char in "\"'":
            tell(quoted((yield from self._string(within))))
        elif char in _CLOSING:
            yield from self._members(tell, depth)
        elif char in "-+.0123456789":
            tell((yield from self._number()))
        else:
            word = yield from self.source.word(_LETTERS, limit=_WORD_LENGTH_LIMIT)
            if word not in _LITERALS:
                raise Malformed("it has a value that is no literal")
            tell(_LITERALS[word])

    def _members(self, tell: Tell, depth: int) -> Reading[None]:
        source = self.source
        opening = source.take(1)
        closing = _CLOSING[opening]
        tell("{" if opening == "{" else "[")
        is_first = True
        while True:
            yield from source.space()
            if (yield from source.accepts(closing)):
                tell("}" if opening == "{" else "]")
                return
            tell("" if is_first else ", ")
            is_first = False
            if opening == "{":
                yield from self._key(tell)
            yield from self.value(tell, within=opening, depth=depth + 1)
            yield from source.space()
            if not (yield from source.accepts(",")) and not (yield from source.sees(closing)):
                raise Malformed("a comma or a closing bracket is missing")

    def _key(self, tell: Tell) -> Reading[None]:
        char = yield from self.source.peek()
        if not char or char not in "\"'":
            raise Malformed("a key is no string")
        tell(quoted((yield from self._string("{"))))
        yield from self.source.space()
        if not (yield from self.source.accepts(":")):
            raise Malformed("a key has no value")
        tell(": ")
        yield from self.source.space()

    def _number(self) -> Reading[str]:
        word = yield from self.source.word(_NUMBER_LETTERS, limit=_WORD_LENGTH_LIMIT)
        if _JSON_NUMBER.fullmatch(word):
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
            yield from source.run(_UNTIL[quote], parts.append)
            char = yield from source.peek()
            if not char:
                raise Malformed("the output ended inside a string")
            source.take(1)
            if char == "\\":
                parts.append((yield from self._escape()))
            elif (yield from source.ahead(_BEHIND[within])) is not None:
                return "".join(parts)
            else:
                self.is_repaired = True
                parts.append(char)

    def _after_two_quotes(self, quote: str, within: str) -> Reading[str]:
        """Read on behind the first of what are two quotes more, or one more and nothing between them."""
        source = self.source
        source.take(2)
        parts: list[str] = []
        while True:
            marker = yield from source.until((quote * 3, "\\"), parts.append)
            if not marker:
                raise Malformed("the output ended inside a string")
            if marker == "\\":
                parts.append((yield from self._escape()))
            elif (yield from source.ahead(_BEHIND[within])) is not None:
                return "".join(parts)
            else:
                parts.append(quote)
                source.give_back(quote * 2)

    def _escape(self) -> Reading[str]:
        """Read what follows a backslash; return what both mean."""
        char = yield from self.source.peek()
        if not char:
            raise Malformed("the output ended inside a string")
        self.source.take(1)
        if char in _DIGIT_COUNTS:
            count = _DIGIT_COUNTS[char]
            match = yield from self.source.ahead(
                regex.compile(rf"[0-9A-Fa-f]{{{count}}}(?=.|$)", regex.DOTALL)
            )
            if match is None or int(match[0], 16) > 0x10FFFF:
                return f"\\{char}"
            return chr(int(self.source.take(count), 16)).encode("utf-8", "replace").decode("utf-8")
        return _SIMPLE_ESCAPES.get(char, f"\\{char}")


def python_literal(text: str) -> tuple[str, bool]:
    """Return a whole Python literal as JSON, and whether it was repaired; raises Malformed."""
    reader = PythonText(Source(text, has_ended=True))
    parts: list[str] = []
    read_whole(reader.value(parts.append, within=""))
    if reader.source.rest.strip():
        raise Malformed("something follows the value")
    return "".join(parts), reader.is_repaired
