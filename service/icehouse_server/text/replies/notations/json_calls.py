"""Calls as JSON: objects with a name and arguments, alone, in a row or in a list, between markers or bare."""

from __future__ import annotations

import dataclasses

import regex

from icehouse_server.text.replies.core.calls import Calls, decoded
from icehouse_server.text.values.json_text import JsonText, strict, tolerant
from icehouse_server.text.values.source import Malformed, Reading, Source

_NAMES = frozenset({"name", "tool_name", "function_name", "tool"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args"})
_IDS = frozenset({"id", "tool_call_id", "call_id"})
_EMPTY = frozenset({"type", "index"})
"""Keys that say nothing of the call."""
_FENCE = regex.compile(r"```[A-Za-z]{0,20}\s{0,20}")
_BEGUN = regex.compile(r"\s{0,200}(?:```[a-z]{0,9}\s{0,9})?(?:\[\s{0,200})?\{")
_BARE = regex.compile(
    r'\s{0,200}(?:```[a-z]{0,9}\s{0,9})?\[?\s{0,200}\{\s{0,200}(?:"type"\s{0,9}:\s{0,9}"function"\s{0,9},\s{0,99})?'
    r'"(?:name|tool_name|function_name)"\s{0,9}:\s{0,9}"([^"\\]{1,200})"'
)


@dataclasses.dataclass(frozen=True, slots=True)
class JsonCalls:
    """The notation, by its markers and keys."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    arguments_key: str = "arguments"
    """The key that the family writes; others are understood as well."""
    is_bare: bool = False
    """A reply may begin with calls and no marker."""
    is_fenced: bool = False
    """The family writes a code fence around them."""
    is_list: bool = False
    """The family writes them as a list."""
    is_foreign: bool = False
    """The family writes calls otherwise, and is understood all the same."""
    given_back: str = ""
    """The end of each start that is the beginning of the calls already."""
    has_late_id: bool = False
    """Ids come behind the arguments, which wait for them."""

    def begins(self, source: Source, calls: Calls) -> Reading[bool]:
        if not self.is_bare:
            return False
        match = yield from source.ahead(_BARE)
        return match is not None and calls.offers(match[1])

    @property
    def wary_starts(self) -> tuple[str, ...]:
        return ()

    def continues(self, source: Source, calls: Calls, marker: str) -> Reading[bool]:
        return bool(self.given_back) or (yield from source.ahead(_BEGUN)) is not None

    def read(self, source: Source, calls: Calls, marker: str) -> Reading[None]:
        """Read what follows the start."""
        is_odd = self.is_foreign
        count = 0
        ends = self.ends if marker else ()
        source.give_back(self.given_back)
        while True:
            yield from source.space()
            if (yield from source.accepts(*ends)):
                break
            fence = yield from source.ahead(_FENCE)
            if fence is not None:
                source.take(fence.end())
                is_odd = is_odd or not self.is_fenced
                continue
            char = yield from source.peek()
            if char == "[":
                source.take(1)
                count += yield from self._list(source, calls, is_odd=is_odd or not self.is_list)
            elif char == "{":
                yield from self._object(source, calls, is_odd=is_odd or (count > 0 and bool(marker)))
                count += 1
            elif char and char in ",;" and count:
                source.take(1)
                continue
            elif not char or (count and (not ends or (yield from source.sees(*self.starts)))):
                break
            else:
                raise Malformed("it is no call in JSON")
            is_over = yield from self._is_over(source, ends)
            if is_over:
                break
        if not count:
            calls.end(problem="there is no call in it")

    def _is_over(self, source: Source, ends: tuple[str, ...]) -> Reading[bool]:
        """Tell whether calls that nothing ends have ended: none follows."""
        if ends:
            return False
        return not (yield from source.ahead(regex.compile(r"\s{0,200}(?:[,;]\s{0,99})?\{|\s{0,99}```")))

    def _list(self, source: Source, calls: Calls, *, is_odd: bool) -> Reading[int]:
        count = 0
        while True:
            yield from source.space()
            char = yield from source.peek()
            if char == "]":
                source.take(1)
                return count
            if char == "," and count:
                source.take(1)
                continue
            if not char:
                if not count:
                    raise Malformed("the output ended inside it")
                return count
            if count and (yield from source.sees(*self.ends)):
                return count
            if char != "{":
                raise Malformed("it names no tool" if char == '"' else "it is no call in JSON")
            yield from self._object(source, calls, is_odd=is_odd)
            count += 1

    def _object(self, source: Source, calls: Calls, *, is_odd: bool) -> Reading[None]:
        """Read one call and look at what follows it."""
        calls.start()
        reader = _CallObject(JsonText(source, (*self.ends, "```")), calls, self)
        yield from reader.read()
        gap = yield from source.space()
        char = yield from source.peek()
        is_closed = not self.ends or self.is_bare or bool((yield from source.sees(*self.ends)))
        if not is_closed and char and char not in "{[,;]`" and not (yield from source.sees(*self.starts)):
            raise Malformed("something follows the call")
        # What comes next is more of them, or the end of the section was forgotten.
        is_odd = is_odd or not (is_closed or (char and char in "{[,;]`"))
        source.give_back(gap)
        calls.end(is_repaired=is_odd or reader.is_odd, problem=reader.problem)


class _CallObject:
    """A reader of one object."""

    def __init__(self, text: JsonText, calls: Calls, notation: JsonCalls) -> None:
        self._text = text
        self._source = text.source
        self._calls = calls
        self._notation = notation
        self._name: str | None = None
        self._id = ""
        self._is_named = False
        self._held: str | None = None
        """Arguments that came before the name."""
        self._has_arguments = False
        self._is_odd = False
        self.problem = ""

    @property
    def is_odd(self) -> bool:
        return self._is_odd or self._text.is_repaired

    def read(self) -> Reading[None]:
        """Read the object and tell the call, but for its end."""
        yield from self._members()
        if self._name is None:
            raise Malformed("it names no tool")
        self._tell_name()
        if self._held is not None:
            self._calls.argue(self._held)
        elif not self._has_arguments:
            self._calls.argue("{}")

    def _members(self) -> Reading[None]:
        source = self._source
        source.take(1)
        is_first = True
        while True:
            yield from source.space()
            if (yield from self._closes(is_first)):
                return
            if not is_first:
                if not (yield from source.accepts(",")):
                    raise Malformed("it is no JSON: a comma or a closing bracket is missing")
                yield from source.space()
                if (yield from source.accepts("}")):
                    self._is_odd = True
                    return
            is_first = False
            key = decoded((yield from self._string()))
            yield from source.space()
            if not (yield from source.accepts(":")):
                raise Malformed("it is no JSON: a key has no value")
            yield from source.space()
            yield from self._member(key)

    def _closes(self, is_first: bool) -> Reading[bool]:
        """Read the closing bracket; tell whether there is one, or could be: the rest was forgotten."""
        source = self._source
        if (yield from source.accepts("}")):
            return True
        if is_first:
            return False
        has_ended = not (yield from source.peek())
        if has_ended and (source.is_cut or not self._has_arguments):
            raise Malformed("the output ended inside it")
        if has_ended or (yield from source.sees(*self._text.ends)):
            self._is_odd = True
            return True
        return False

    def _member(self, key: str) -> Reading[None]:
        char = yield from self._source.peek()
        if key in _NAMES or (key == "function" and char == '"'):
            value = strict((yield from self._text.text()))
            if not isinstance(value, str) or not value or self._name is not None:
                raise Malformed("it names no tool, or two")
            self._name = value
        elif key in _ARGUMENTS:
            if self._has_arguments:
                raise Malformed("it has arguments twice")
            self._has_arguments = True
            self._is_odd = self._is_odd or key != self._notation.arguments_key
            yield from self._arguments(char)
        elif key in _IDS:
            value = strict((yield from self._text.text()))
            self._id = str(value) if isinstance(value, (str, int)) else ""
        elif key == "function" and char == "{":
            self._is_odd = True
            yield from self._members()
        else:
            yield from self._text.text()
            if key not in _EMPTY:
                self.problem = self.problem or f"it has {key[:64]!r} beside its name and arguments"

    def _arguments(self, char: str) -> Reading[None]:
        if char != "{":
            self._held = yield from self._odd_arguments()
        elif self._name is None or self._notation.has_late_id:
            self._held = yield from self._text.text()
        else:
            self._tell_name()
            yield from self._text.value(self._calls.argue)

    def _odd_arguments(self) -> Reading[str]:
        """Read arguments that are no object: a text that is one, or null."""
        value = strict((yield from self._text.text()))
        self._is_odd = True
        if value is None:
            return "{}"
        if not isinstance(value, str):
            raise Malformed("its arguments are no JSON object")
        try:
            found, _ = tolerant(value)
        except Malformed:
            raise Malformed("its arguments are text that is no JSON, or nested too deep") from None
        if not found.startswith("{"):
            raise Malformed("its arguments are no JSON object")
        return found

    def _tell_name(self) -> None:
        if not self._is_named and self._name is not None:
            self._is_named = True
            self._calls.name(self._name, self._id)

    def _string(self) -> Reading[str]:
        parts: list[str] = []
        yield from self._text.string(parts.append)
        return "".join(parts)
