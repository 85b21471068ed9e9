"""Calls in the syntax of Python functions, and Gemma's variant.

Python: `[f(city="Oslo", days=2), g()]`, or one call a line, between markers or bare. Gemma:
`call:f{city:<escape>Oslo<escape>,days:2}`, with bare keys and strings between marks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import regex

from icehouse_server.text.replies.notation import Notation, ReplyCalls
from icehouse_server.text.values.literals import Emit, JsonText, PythonText, quoted
from icehouse_server.text.values.text_source import Malformed, Reading, TextSource

_NAME = r"[A-Za-z_][\w.\-]{0,199}"
_CALL = regex.compile(rf"(?P<name>{_NAME})\s{{0,20}}\(")
_KEYWORD = regex.compile(r"(?P<name>[A-Za-z_]\w{0,199})\s{0,20}=(?!=)\s{0,20}")
_FENCE = regex.compile(r"```[A-Za-z_]{0,20}\s{0,20}")
_BEHIND = regex.compile(rf"\s{{0,200}}(?:[,;]\s{{0,200}})?(?:{_NAME}\s{{0,20}}\(|\]|```|$)")
"""What may follow a call, besides the end of the section."""
_BARE = regex.compile(rf"\s{{0,200}}\[\s{{0,200}}(?P<name>{_NAME})\s{{0,20}}\(")
_BEGUN = regex.compile(
    rf"\s{{0,200}}(?:```[A-Za-z_]{{0,20}}\s{{0,20}})?\[?\s{{0,200}}(?P<name>{_NAME})\s{{0,20}}\("
)
_GEMMA_HEAD = regex.compile(r"\s{0,200}call:(?P<name>[\w.\-]{1,200})(?=\{)")
_GEMMA_KEY = regex.compile(r"\s{0,200}(?P<name>[^\s:{}\[\],<>\"]{1,200})\s{0,20}:")


@dataclasses.dataclass(frozen=True, slots=True)
class PythonCalls(Notation):
    """Calls as Python writes them."""

    bare: ClassVar[Any] = _BARE
    is_code: bool = False
    """Whether any code may come between the markers; only calls are read."""
    is_list: bool = True
    """Whether the family writes a list, not one call a line."""

    @property
    def ambiguous_starts(self) -> tuple[str, ...]:
        return self.starts if self.is_code else ()

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        match = yield from source.ahead(_BEGUN)
        return match is not None and (not self.is_code or calls.offers(match["name"]))

    def _read_calls(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[int]:
        ends = self.ends if marker else ()
        is_in_list = False
        count = 0
        while True:
            yield from source.space()
            fence = yield from source.ahead(_FENCE)
            if fence is not None and not is_in_list:
                source.take(fence.end())
            elif not is_in_list and ((yield from source.accepts(*ends)) or (count and not ends)):
                break
            elif (yield from source.accepts("]")) and is_in_list:
                is_in_list = False
                if not ends:
                    break
            elif (yield from source.ahead(_CALL)) is not None:
                yield from self._call(source, calls, is_irregular=self.is_list != is_in_list)
                count += 1
                yield from source.space()
                yield from source.accepts(",", ";")
            elif not is_in_list and (yield from source.accepts("[")):
                is_in_list = True
            elif count and not (yield from source.peek()):
                break
            else:
                raise (yield from source.failure("it is not a function call"))
        return count

    def _call(self, source: TextSource, calls: ReplyCalls, *, is_irregular: bool) -> Reading[None]:
        calls.begin_call()
        head = yield from source.ahead(_CALL)
        assert head is not None, "looked at before"
        source.take(head.end())
        calls.name_tool(head["name"])
        names: set[str] = set()
        text = PythonText(source, within="f")
        calls.add_arguments("{")
        while True:
            yield from source.space()
            if (yield from source.accepts(")")):
                break
            keyword = yield from source.ahead(_KEYWORD)
            if keyword is None:
                raise (yield from source.failure("an argument has no name"))
            source.take(keyword.end())
            if keyword["name"] in names:
                raise Malformed(f"it has the argument {keyword['name'][:64]!r} twice")
            calls.add_arguments(f"{', ' if names else ''}{quoted(keyword['name'])}: ")
            names.add(keyword["name"])
            yield from text.value(calls.add_arguments)
            yield from source.space()
            if not (yield from source.accepts(",")) and not (yield from source.sees(")")):
                raise (yield from source.failure("a comma is missing"))
        calls.add_arguments("}")
        if (yield from source.ahead(_BEHIND)) is None:
            yield from source.space()
            if not (yield from source.sees(*self.ends)):
                raise Malformed("something follows the call")
        calls.end_call(is_repaired=is_irregular or text.is_repaired)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls(Notation):
    """Calls with bare keys; strings are between two `quote` marks."""

    quote: str

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        return (yield from source.ahead(_GEMMA_HEAD)) is not None

    def _read_calls(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[int]:
        count = 0
        while True:
            head = yield from source.ahead(_GEMMA_HEAD)
            if head is None:
                break
            calls.begin_call()
            source.take(head.end())
            calls.name_tool(head["name"])
            text = _GemmaText(source, quote=self.quote)
            yield from text.value(calls.add_arguments)
            calls.end_call(is_repaired=text.is_repaired)
            count += 1
        yield from source.space()
        has_end = yield from source.accepts(*self.ends)
        has_ended = not (yield from source.peek())
        if not has_end and not (count and has_ended):
            raise Malformed("the output ended inside it" if has_ended else "it is not a function call")
        return count


@dataclasses.dataclass(slots=True)
class _GemmaText(JsonText):
    """Reads JSON with bare keys, and strings between marks."""

    quote: str = ""

    def _scalar(self, emit: Emit, char: str, within: str) -> Reading[None]:
        if not (yield from self.source.accepts(self.quote)):
            yield from JsonText._scalar(self, emit, char, within)
            return
        parts: list[str] = []
        if not (yield from self.source.until((self.quote,), parts.append)):
            raise Malformed("the output ended inside a string")
        emit(quoted("".join(parts)))

    def _key(self, emit: Emit) -> Reading[None]:
        key = yield from self.source.ahead(_GEMMA_KEY)
        if key is None:
            raise (yield from self.source.failure("a value has no key"))
        self.source.take(key.end())
        emit(f"{quoted(key['name'])}: ")
        yield from self.source.space()
