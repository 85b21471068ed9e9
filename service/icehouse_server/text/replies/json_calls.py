"""Calls as JSON: objects with a name and arguments, or a name and then the arguments.

Objects come alone, in a row or in a list, between markers or bare. Names come before their arguments, with
markers around the parts, as in `name[ARGS]{…}`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import regex

from icehouse_server.text.replies.notation import Notation, ReplyCalls
from icehouse_server.text.values.literals import JsonText, decoded, strict, tolerant
from icehouse_server.text.values.text_source import Malformed, Reading, TextSource

_NAMES = frozenset({"name", "tool_name", "function_name", "tool"})
_ARGUMENTS = frozenset({"arguments", "parameters", "args"})
_IDS = frozenset({"id", "tool_call_id", "call_id"})
_EMPTY = frozenset({"type", "index"})
"""Keys that mean nothing for the call."""
_FENCE = regex.compile(r"```[A-Za-z]{0,20}\s{0,20}")
_SPACED_FENCE = regex.compile(r"\s{0,20}```[A-Za-z]{0,20}\s{0,20}")
_MORE = regex.compile(r"\s{0,200}(?:[,;]\s{0,99})?\{|\s{0,99}```")
"""What follows a call if another one comes and the section has no end marker."""
_BEGUN = regex.compile(r"\s{0,200}(?:```[a-z]{0,9}\s{0,9})?(?:\[\s{0,200})?\{")
_BARE = regex.compile(
    r'\s{0,200}(?:```[a-z]{0,9}\s{0,9})?\[?\s{0,200}\{\s{0,200}(?:"type"\s{0,9}:\s{0,9}"function"\s{0,9},\s{0,99})?'
    r'"(?:name|tool_name|function_name)"\s{0,9}:\s{0,9}"(?P<name>[^"\\]{1,200})"'
)


@dataclasses.dataclass(frozen=True, slots=True)
class JsonCalls(Notation):
    """Objects whose keys give the call's name and arguments."""

    bare: ClassVar[Any] = _BARE
    arguments_key: str = "arguments"
    """The key that the family writes; other usual ones are read as well."""
    is_list: bool = False
    """Whether the family writes its calls as a list."""
    is_foreign: bool = False
    """Whether the family usually writes calls in another notation; these are read all the same."""
    put_back_text: str = ""
    """The end of every start marker that is already part of the calls."""
    has_late_id: bool = False
    """Whether ids come after the arguments, which are held back until then."""

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        return bool(self.put_back_text) or (yield from source.ahead(_BEGUN)) is not None

    def _read_calls(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[int]:
        is_irregular = self.is_foreign
        count = 0
        ends = self.ends if marker else ()
        source.put_back(self.put_back_text)
        while True:
            yield from source.space()
            if (yield from source.accepts(*ends)):
                break
            fence = yield from source.ahead(_FENCE)
            if fence is not None:
                source.take(fence.end())
                is_irregular = True
                continue
            char = yield from source.peek()
            if char == "[":
                source.take(1)
                count += yield from self._list(source, calls, is_irregular=is_irregular or not self.is_list)
            elif char == "{":
                yield from self._object(
                    source, calls, is_irregular=is_irregular or (count > 0 and bool(marker))
                )
                count += 1
            elif char and char in ",;" and count:
                source.take(1)
                continue
            elif not char or (count and (not ends or (yield from source.sees(*self.starts)))):
                break
            else:
                raise Malformed("it is not a JSON call")
            if not ends and (yield from source.ahead(_MORE)) is None:
                break
        return count

    def _list(self, source: TextSource, calls: ReplyCalls, *, is_irregular: bool) -> Reading[int]:
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
                raise Malformed("it names no tool" if char == '"' else "it is not a JSON call")
            yield from self._object(source, calls, is_irregular=is_irregular)
            count += 1

    def _object(self, source: TextSource, calls: ReplyCalls, *, is_irregular: bool) -> Reading[None]:
        """Read one call and look at what follows it."""
        calls.begin_call()
        reader = _CallObject(JsonText(source, (*self.ends, "```")), calls, self)
        yield from reader.read()
        gap = yield from source.space()
        char = yield from source.peek()
        is_closed = not self.ends or self.is_bare or bool((yield from source.sees(*self.ends)))
        if not is_closed and char and char not in "{[,;]`" and not (yield from source.sees(*self.starts)):
            raise Malformed("something follows the call")
        # Either another call follows, or the model forgot the end of the section.
        is_irregular = is_irregular or not (is_closed or (char and char in "{[,;]`"))
        source.put_back(gap)
        calls.end_call(is_repaired=is_irregular or reader.is_irregular, problem=reader.problem)


class _CallObject:
    """Reads one object."""

    def __init__(self, text: JsonText, calls: ReplyCalls, notation: JsonCalls) -> None:
        self._text = text
        self._source = text.source
        self._calls = calls
        self._notation = notation
        self._name: str | None = None
        self._id = ""
        self._is_named = False
        self._held: str | None = None
        """Arguments that are held back: they came before the name, or the id is still to come."""
        self._has_arguments = False
        self._is_irregular = False
        self.problem = ""

    @property
    def is_irregular(self) -> bool:
        return self._is_irregular or self._text.is_repaired

    def read(self) -> Reading[None]:
        """Read the object and pass on the call, except for its end."""
        yield from self._members()
        if self._name is None:
            raise Malformed("it names no tool")
        self._emit_name()
        if self._held is not None:
            self._calls.add_arguments(self._held)
        elif not self._has_arguments:
            self._calls.add_arguments("{}")

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
                    raise Malformed("it is not JSON: a comma or a closing bracket is missing")
                yield from source.space()
                if (yield from source.accepts("}")):
                    self._is_irregular = True
                    return
            is_first = False
            key: list[str] = []
            yield from self._text.string(key.append)
            yield from source.space()
            if not (yield from source.accepts(":")):
                raise Malformed("it is not JSON: a key has no value")
            yield from source.space()
            yield from self._member(decoded("".join(key)))

    def _closes(self, is_first: bool) -> Reading[bool]:
        """Read the closing bracket; return whether the object ends here, with or without one."""
        source = self._source
        if (yield from source.accepts("}")):
            return True
        if is_first:
            return False
        has_ended = not (yield from source.peek())
        if has_ended and (source.is_cut or not self._has_arguments):
            raise Malformed("the output ended inside it")
        if has_ended or (yield from source.sees(*self._text.ends)):
            self._is_irregular = True
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
                raise Malformed("it has two sets of arguments")
            self._has_arguments = True
            self._is_irregular = self._is_irregular or key != self._notation.arguments_key
            yield from self._arguments(char)
        elif key in _IDS:
            value = strict((yield from self._text.text()))
            self._id = str(value) if isinstance(value, (str, int)) else ""
        elif key == "function" and char == "{":
            self._is_irregular = True
            yield from self._members()
        else:
            yield from self._text.text()
            if key not in _EMPTY:
                self.problem = self.problem or f"it has {key[:64]!r} beside its name and arguments"

    def _arguments(self, char: str) -> Reading[None]:
        if char != "{":
            self._held = yield from self._irregular_arguments()
        elif self._name is None or self._notation.has_late_id:
            self._held = yield from self._text.text()
        else:
            self._emit_name()
            yield from self._text.value(self._calls.add_arguments)

    def _irregular_arguments(self) -> Reading[str]:
        """Read arguments that are not an object: a string that contains one, or null."""
        value = strict((yield from self._text.text()))
        self._is_irregular = True
        if value is None:
            return "{}"
        if not isinstance(value, str):
            raise Malformed("its arguments are not a JSON object")
        try:
            text = tolerant(value).json_text
        except Malformed:
            raise Malformed("its arguments are text that is not JSON, or nested too deeply") from None
        if not text.startswith("{"):
            raise Malformed("its arguments are not a JSON object")
        return text

    def _emit_name(self) -> None:
        if not self._is_named and self._name is not None:
            self._is_named = True
            self._calls.name_tool(self._name, self._id)


@dataclasses.dataclass(frozen=True, slots=True)
class NamedJson(Notation):
    """A name, then arguments in JSON. A section is any number of calls, each `call_start` NAME `name_end`
    JSON `call_end`."""

    call_start: str = ""
    name_end: str = ""
    call_end: str = ""
    id_start: str = ""
    """The marker between a name and the call's id, if the family writes one there."""
    name_pattern: str = r"[\w.\-]{1,200}"
    """A pattern of the package `regex`. Its groups `name` and `id`, if any, are the call's."""
    is_lone: bool = False
    """Whether the start marker belongs to the call, so that a section is one call."""
    is_fenced: bool = False
    """Whether the family writes a code fence around the JSON."""

    @property
    def ambiguous_starts(self) -> tuple[str, ...]:
        return self.starts if self.is_lone else ()

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        return (yield from source.ahead(_head(self))) is not None

    def _read_calls(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[int]:
        count = 0
        while True:
            if self.ends:
                yield from source.space()
                if (yield from source.accepts(*self.ends)):
                    break
            head = yield from source.ahead(_head(self))
            if head is None:
                if count and (not self.ends or not (yield from source.peek())):
                    return count
                raise (yield from source.failure("it names no tool"))
            calls.begin_call()
            source.take(head.end())
            groups = head.groupdict()
            calls.name_tool(groups["name"], groups.get("id") or "")
            text = JsonText(source, tuple(filter(None, (self.call_end, *self.ends, "```"))))
            is_irregular = yield from self._arguments(source, calls, text)
            calls.end_call(is_repaired=is_irregular or text.is_repaired)
            count += 1
            if self.is_lone:
                break
        return count

    def _arguments(self, source: TextSource, calls: ReplyCalls, text: JsonText) -> Reading[bool]:
        """Read the arguments and the end of the call; return whether they are irregular."""
        fence = yield from source.ahead(_SPACED_FENCE)
        if fence is not None:
            source.take(fence.end())
        if (yield from source.peek()) != "{":
            raise Malformed("its arguments are not a JSON object")
        yield from text.value(calls.add_arguments)
        if fence is not None or self.is_fenced:
            behind = yield from source.ahead(_SPACED_FENCE)
            source.take(0 if behind is None else behind.end())
        is_irregular = fence is not None and not self.is_fenced
        if self.call_end:
            yield from source.space()
            if not (yield from source.accepts(self.call_end)):
                if (yield from source.peek()) and not (yield from source.sees(*self.ends)):
                    raise Malformed("something follows the arguments")
                is_irregular = True
        return is_irregular


@functools.cache
def _head(notation: NamedJson) -> Any:
    """Return the pattern that matches everything before a call's arguments."""
    name = notation.name_pattern
    if "(?P<name>" not in name:
        name = f"(?P<name>{name})"
    own_id = ""
    if notation.id_start:
        own_id = rf"(?:{re.escape(notation.id_start)}\s{{0,9}}(?P<id>[\w.:\-]{{1,200}})\s{{0,9}})?"
    start = re.escape(notation.call_start)
    return regex.compile(
        rf"\s{{0,200}}{start}\s{{0,20}}{name}\s{{0,20}}{own_id}{re.escape(notation.name_end)}\s{{0,200}}"
    )
