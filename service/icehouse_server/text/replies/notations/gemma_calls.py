"""Calls as Gemma writes them: `call:f{city:<escape>Oslo<escape>,days:2}`, keys bare, strings between
marks."""

from __future__ import annotations

import dataclasses

import regex

from icehouse_server.text.replies.core.calls import Calls
from icehouse_server.text.values.json_text import DEPTH_LIMIT, JsonText, Tell, quoted
from icehouse_server.text.values.source import Malformed, Reading, Source

_HEAD = regex.compile(r"\s{0,200}call:(?P<name>[\w.\-]{1,200})(?=\{)")
_KEY = regex.compile(r"\s{0,200}(?P<name>[^\s:{}\[\],<>\"]{1,200})\s{0,20}:")


@dataclasses.dataclass(frozen=True, slots=True)
class GemmaCalls:
    """The notation, by its markers; `quote` stands on both sides of a string."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    quote: str

    def begins(self, source: Source, calls: Calls) -> Reading[bool]:
        yield from ()
        return False

    @property
    def wary_starts(self) -> tuple[str, ...]:
        return ()

    def continues(self, source: Source, calls: Calls, marker: str) -> Reading[bool]:
        return (yield from source.ahead(_HEAD)) is not None

    def read(self, source: Source, calls: Calls, marker: str) -> Reading[None]:
        """Read what follows the start."""
        count = 0
        while True:
            head = yield from source.ahead(_HEAD)
            if head is None:
                break
            calls.start()
            source.take(head.end())
            calls.name(head["name"])
            yield from self._value(source, calls.argue, depth=0)
            calls.end()
            count += 1
        yield from source.space()
        has_end = yield from source.accepts(*self.ends)
        has_ended = not (yield from source.peek())
        if not has_end and not (count and has_ended):
            raise Malformed("the output ended inside it" if has_ended else "it is no call of a function")
        if not count:
            calls.end(problem="there is no call in it")

    def _value(self, source: Source, tell: Tell, *, depth: int) -> Reading[None]:
        if depth > DEPTH_LIMIT:
            raise Malformed(f"it is nested deeper than {DEPTH_LIMIT} brackets")
        yield from source.space()
        opening = yield from source.accepts("{", "[", self.quote)
        if opening == self.quote:
            parts: list[str] = []
            if not (yield from source.until((self.quote,), parts.append)):
                raise Malformed("the output ended inside a string")
            tell(quoted("".join(parts)))
        elif opening:
            yield from self._members(source, tell, opening, depth=depth)
        else:
            yield from JsonText(source).value(tell)

    def _members(self, source: Source, tell: Tell, opening: str, *, depth: int) -> Reading[None]:
        closing = "}" if opening == "{" else "]"
        tell(opening)
        is_first = True
        while True:
            yield from source.space()
            if is_first and (yield from source.accepts(closing)):
                break
            if opening == "{":
                key = yield from source.ahead(_KEY)
                if key is None:
                    has_ended = not (yield from source.peek())
                    raise Malformed("the output ended inside it" if has_ended else "a value has no key")
                source.take(key.end())
                tell(f"{'' if is_first else ', '}{quoted(key['name'])}: ")
            elif not is_first:
                tell(", ")
            is_first = False
            yield from self._value(source, tell, depth=depth + 1)
            yield from source.space()
            if (yield from source.accepts(closing)):
                break
            if not (yield from source.accepts(",")):
                has_ended = not (yield from source.peek())
                raise Malformed("the output ended inside it" if has_ended else "a comma is missing")
        tell(closing)
