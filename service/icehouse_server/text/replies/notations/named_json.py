"""Calls as a name and then arguments in JSON: `name[ARGS]{…}` and the like, with markers around the parts."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import regex

from icehouse_server.text.replies.core.calls import Calls
from icehouse_server.text.values.json_text import JsonText
from icehouse_server.text.values.source import Malformed, Reading, Source


@dataclasses.dataclass(frozen=True, slots=True)
class NamedJson:
    """The notation, by its markers. A section has any number of calls: `call_start` NAME `name_end` JSON
    `call_end`."""

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    call_start: str = ""
    name_end: str = ""
    call_end: str = ""
    id_start: str = ""
    """Stands between a name and the call's id, where the family writes one there."""
    name_pattern: str = r"[\w.\-]{1,200}"
    """A pattern of the package `regex`. Its groups `name` and `id`, where it has them, are the call's."""
    is_lone: bool = False
    """The start belongs to the call, so that a section has one."""
    is_fenced: bool = False
    """The family writes a code fence around the JSON."""

    def begins(self, source: Source, calls: Calls) -> Reading[bool]:
        yield from ()
        return False

    @property
    def wary_starts(self) -> tuple[str, ...]:
        return self.starts if self.is_lone else ()

    def continues(self, source: Source, calls: Calls, marker: str) -> Reading[bool]:
        return (yield from source.ahead(self._head)) is not None

    @property
    def _head(self) -> Any:
        return _head(self)

    def read(self, source: Source, calls: Calls, marker: str) -> Reading[None]:
        """Read what follows the start."""
        count = 0
        while True:
            if self.ends:
                yield from source.space()
                if (yield from source.accepts(*self.ends)):
                    break
            head = yield from source.ahead(self._head)
            if head is None:
                if count and (not self.ends or not (yield from source.peek())):
                    return
                char = yield from source.peek()
                raise Malformed("it names no tool" if char else "the output ended inside it")
            calls.start()
            source.take(head.end())
            groups = head.groupdict()
            calls.name(groups["name"], groups.get("id") or "")
            text = JsonText(source, tuple(filter(None, (self.call_end, *self.ends, "```"))))
            is_odd = yield from self._arguments(source, calls, text)
            calls.end(is_repaired=is_odd or text.is_repaired)
            count += 1
            if self.is_lone:
                return
        if not count:
            calls.end(problem="there is no call in it")

    def _arguments(self, source: Source, calls: Calls, text: JsonText) -> Reading[bool]:
        """Read the arguments and the end of the call; return whether they are not written as usual."""
        fence = yield from source.ahead(_FENCE)
        if fence is not None:
            source.take(fence.end())
        if (yield from source.peek()) != "{":
            raise Malformed("its arguments are no JSON object")
        yield from text.value(calls.argue)
        if fence is not None or self.is_fenced:
            behind = yield from source.ahead(_FENCE)
            source.take(0 if behind is None else behind.end())
        is_odd = fence is not None and not self.is_fenced
        if self.call_end:
            yield from source.space()
            if not (yield from source.accepts(self.call_end)):
                if (yield from source.peek()) and not (yield from source.sees(*self.ends)):
                    raise Malformed("something follows the arguments")
                is_odd = True
        return is_odd


_FENCE = regex.compile(r"\s{0,20}```[A-Za-z]{0,20}\s{0,20}")


@functools.cache
def _head(notation: NamedJson) -> Any:
    """Return the pattern of what stands before a call's arguments."""
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
