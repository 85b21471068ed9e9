"""Calls as Python writes them: `[f(city="Oslo", days=2), g()]`, or one a line, between markers or bare."""

from __future__ import annotations

import dataclasses

import regex

from icehouse_server.text.replies.core.calls import Calls
from icehouse_server.text.values.json_text import quoted
from icehouse_server.text.values.python_text import PythonText
from icehouse_server.text.values.source import Malformed, Reading, Source

_NAME = r"[A-Za-z_][\w.\-]{0,199}"
_CALL = regex.compile(rf"(?P<name>{_NAME})\s{{0,20}}\(")
_KEYWORD = regex.compile(r"(?P<name>[A-Za-z_]\w{0,199})\s{0,20}=(?!=)\s{0,20}")
_FENCE = regex.compile(r"```[A-Za-z_]{0,20}\s{0,20}")


@dataclasses.dataclass(frozen=True, slots=True)
class PythonCalls:
    """The notation, by its markers."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_bare: bool = False
    """A reply may begin with a list of calls and no marker."""
    is_code: bool = False
    """What stands between the markers may be any code; calls alone are read."""
    is_list: bool = True
    """The family writes a list, and not a call a line."""

    def begins(self, source: Source, calls: Calls) -> Reading[bool]:
        if not self.is_bare:
            return False
        match = yield from source.ahead(_BARE)
        return match is not None and calls.offers(match["name"])

    @property
    def wary_starts(self) -> tuple[str, ...]:
        return self.starts if self.is_code else ()

    def continues(self, source: Source, calls: Calls, marker: str) -> Reading[bool]:
        match = yield from source.ahead(_BEGUN)
        return match is not None and (not self.is_code or calls.offers(match["name"]))

    def read(self, source: Source, calls: Calls, marker: str) -> Reading[None]:
        """Read what follows the start."""
        ends = self.ends if marker else ()
        is_in_list = False
        count = 0
        while True:
            yield from source.space()
            fence = yield from source.ahead(_FENCE)
            if fence is not None and not is_in_list:
                source.take(fence.end())
            elif not is_in_list and (yield from source.accepts(*ends)):
                break
            elif not is_in_list and not ends and count:
                return
            elif (yield from source.accepts("]")) and is_in_list:
                is_in_list = False
                if not ends:
                    break
            elif (yield from source.ahead(_CALL)) is not None:
                yield from self._call(source, calls, is_odd=self.is_list != is_in_list)
                count += 1
                yield from source.space()
                yield from source.accepts(",", ";")
            elif not is_in_list and (yield from source.accepts("[")):
                is_in_list = True
            elif count and not (yield from source.peek()):
                return
            else:
                has_ended = not (yield from source.peek())
                raise Malformed("the output ended inside it" if has_ended else "it is no call of a function")
        if not count:
            calls.end(problem="there is no call in it")

    def _sees_end(self, source: Source) -> Reading[bool]:
        """Tell whether white space and the end of the section come next; reads the white space."""
        yield from source.space()
        return bool((yield from source.sees(*self.ends)))

    def _call(self, source: Source, calls: Calls, *, is_odd: bool) -> Reading[None]:
        """Read one call."""
        calls.start()
        head = yield from source.ahead(_CALL)
        assert head is not None, "looked at before"
        source.take(head.end())
        calls.name(head["name"])
        names: set[str] = set()
        text = PythonText(source)
        calls.argue("{")
        while True:
            yield from source.space()
            if (yield from source.accepts(")")):
                break
            keyword = yield from source.ahead(_KEYWORD)
            if keyword is None:
                has_ended = not (yield from source.peek())
                raise Malformed("the output ended inside it" if has_ended else "an argument has no name")
            source.take(keyword.end())
            if keyword["name"] in names:
                raise Malformed(f"it has the argument {keyword['name'][:64]!r} twice")
            calls.argue(f"{', ' if names else ''}{quoted(keyword['name'])}: ")
            names.add(keyword["name"])
            yield from text.value(calls.argue, within="f")
            yield from source.space()
            if not (yield from source.accepts(",")) and not (yield from source.sees(")")):
                has_ended = not (yield from source.peek())
                raise Malformed("the output ended inside it" if has_ended else "a comma is missing")
        calls.argue("}")
        if (yield from source.ahead(_BEHIND)) is None and not (yield from self._sees_end(source)):
            raise Malformed("something follows the call")
        calls.end(is_repaired=is_odd or text.is_repaired)


_BEHIND = regex.compile(rf"\s{{0,200}}(?:[,;]\s{{0,200}})?(?:{_NAME}\s{{0,20}}\(|\]|```|$)")
"""What may follow a call beside the end of the section."""
_BARE = regex.compile(rf"\s{{0,200}}\[\s{{0,200}}(?P<name>{_NAME})\s{{0,20}}\(")
_BEGUN = regex.compile(
    rf"\s{{0,200}}(?:```[A-Za-z_]{{0,20}}\s{{0,20}})?\[?\s{{0,200}}(?P<name>{_NAME})\s{{0,20}}\("
)
