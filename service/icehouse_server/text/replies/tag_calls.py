"""Calls in tags: each argument is between an opening and a closing tag, and its value has no type.

A value may contain closing tags. It ends at the first closing tag that structure follows: the next argument,
or the end of the call and then white space, another call or the end of the output. Argument tags that open
inside a value close inside it. If text follows the end of a call, the value may continue, so the call is held
back until the output ends. If two readings are still possible then, the call is malformed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import regex

from icehouse_server.text.replies.notation import Notation, ReplyCalls
from icehouse_server.text.values.arguments import Argument
from icehouse_server.text.values.text_source import Malformed, Reading, TextSource

_GAP = r"\s{0,200}"
_TEXT_TYPES = frozenset({"string", "true"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TagCalls(Notation):
    """Calls in tags. Patterns are of the package `regex` and bound all repetitions."""

    call_open: str
    """A pattern with a group `name`."""
    call_close: str
    """Empty if a section is one call, so that its end is the call's."""
    argument_open: str
    """A pattern with a group `name`, and a group `type` if the tag gives the value's type."""
    value_open: str
    """The beginning of the tag that opens a value; such tags inside a value belong to it."""
    argument_close: str
    has_line_breaks: bool = False
    """Whether the value excludes one line break after the opening tag and one before the closing tag."""
    is_python: bool = False
    """Whether the family spells True, False and None."""
    begins_with_call: bool = False
    """Whether the start marker is also the beginning of the first call's tag."""
    is_foreign: bool = False
    """Whether this reads calls whose surrounding tag the model forgot."""
    has_cdata: bool = False
    """Whether values that contain markup are in <![CDATA[…]]>."""

    @property
    def ambiguous_starts(self) -> tuple[str, ...]:
        return self.starts if self.begins_with_call else ()

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        begun = marker if self.begins_with_call else ""
        source.put_back(begun)
        match = yield from source.ahead(_patterns(self).call_open)
        source.take(len(begun))
        return match is not None

    def _read_calls(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[int]:
        if self.begins_with_call:
            source.put_back(marker)
        count = 0
        while True:
            opening = yield from source.ahead(_patterns(self).call_open)
            if opening is None:
                if not count and self.begins_with_call:
                    source.take(len(marker))
                is_closed = (yield from source.ahead(_patterns(self).end)) is not None
                if count and not is_closed and (self.begins_with_call or not self.ends):
                    return count
                yield from source.space()
                if (yield from source.accepts(*self.ends)) or (count and not (yield from source.peek())):
                    return count
                raise (yield from source.failure("it names no tool"))
            calls.begin_call()
            source.take(opening.end())
            yield from self._call(source, calls, opening["name"].strip())
            count += 1

    def _call(self, source: TextSource, calls: ReplyCalls, name: str) -> Reading[None]:
        """Read the arguments and the end of a call."""
        arguments: list[Argument] = []
        while True:
            opening = yield from source.ahead(_patterns(self).argument_open)
            if opening is not None:
                source.take(opening.end())
                text = yield from self._value(source, calls, name)
                kind = opening.groupdict().get("type")
                is_text = None if kind is None else kind in _TEXT_TYPES
                arguments.append(Argument(opening["name"].strip(), self._bare(text), is_text))
                continue
            yield from source.space()
            if self.call_close:
                is_over = yield from source.accepts(self.call_close)
            else:
                is_over = yield from source.sees(*self.ends)
            if is_over:
                break
            raise (yield from source.failure("its tags do not balance"))
        is_irregular = self.is_foreign
        if self.call_close and self.ends:
            yield from source.space()
            is_irregular = is_irregular or not (yield from source.peek())
        calls.add_untyped(name, arguments, is_python=self.is_python, is_repaired=is_irregular)

    def _bare(self, text: str) -> str:
        """Return a value without the line breaks or CDATA that the notation puts around it."""
        if self.has_cdata and (match := _CDATA.fullmatch(text)) is not None:
            return str(match[1])
        if self.has_line_breaks:
            text = text.removeprefix("\n").removesuffix("\n")
        return text

    def _value(self, source: TextSource, calls: ReplyCalls, tool: str) -> Reading[str]:
        """Read a value and its closing tag."""
        value = _Value()
        call_ends = self.ends or (self.call_close,)
        tags = tuple(dict.fromkeys((self.value_open, self.argument_close, *self.starts, *call_ends)))
        while True:
            tag = yield from source.until(tags, value.add)
            if not tag:
                return value.at_output_end(source, self.argument_close)
            if tag in self.starts:
                value.note_call(begins=True)
            elif tag in call_ends:
                value.note_call(begins=False)
            elif tag == self.argument_close:
                follows = yield from self._follows(source)
                if follows == "structure" and not value.depth:
                    return value.at_balanced_end()
                if follows:
                    value.note_end()
                value.depth = max(0, value.depth - 1)
            else:
                value.depth += 1
                name = yield from self._name_of(source, value, tag)
                value.is_irregular = value.is_irregular or calls.has_argument(tool, name)
            value.add(tag)

    def _name_of(self, source: TextSource, value: _Value, tag: str) -> Reading[str]:
        """Return the name of the argument that a tag inside a value opens, "" if none."""
        if self.argument_open.endswith(tag):
            match = _patterns(self).named_before.search(value.tail + tag)
        else:
            match = yield from source.ahead(_patterns(self).tag_name)
        return "" if match is None else str(match["name"]).strip()

    def _follows(self, source: TextSource) -> Reading[Literal["", "structure", "end of a call"]]:
        """Return what follows a closing tag: only structure, or the end of a call and then text."""
        patterns = _patterns(self)
        match = yield from source.ahead(patterns.strict)
        # Only now that its end has arrived is it known whether the output was cut off.
        if match is not None and (not source.is_cut or patterns.cut.match(source.rest) is not None):
            return "structure"
        return "end of a call" if (yield from source.ahead(patterns.loose)) is not None else ""


_TAIL_LENGTH = 500
"""Most characters of the tag with an argument's name."""


class _Value:
    """A value whose end is not known yet. `depth` counts the argument tags that are open inside it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self.depth = 0
        self.is_irregular = False
        """Whether a tag inside it names an argument of the tool, so that a closing tag may be missing."""
        self._ends: list[_PossibleEnd] = []
        self._call_count = 0
        self._open_call_count = 0

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def tail(self) -> str:
        """The last part that was read."""
        return "".join(self._parts[-_TAIL_LENGTH:])[-_TAIL_LENGTH:]

    def add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def note_call(self, *, begins: bool) -> None:
        """Note a tag around a call inside the value."""
        self._call_count += begins
        self._open_call_count += 1 if begins else -1

    def at_balanced_end(self) -> str:
        """Return the value, at an end at which all tags inside it are closed."""
        holds_calls = self._call_count > 0 and self._open_call_count == 0
        if self._ends and self.is_irregular and not holds_calls:
            raise Malformed("an argument could end in several places")
        return self.text

    def note_end(self) -> None:
        """Note that the value could end before what comes next."""
        end = _PossibleEnd(self._length, not self.depth, self._call_count, self._open_call_count)
        self._ends.append(end)

    def at_output_end(self, source: TextSource, closing: str) -> str:
        """Return the value once the output has ended, and put back the text after it."""
        if not self._ends or source.is_cut:
            raise Malformed("the output ended inside an argument")
        end = self._only_end()
        if self.is_irregular and not end.is_balanced:
            raise Malformed("its tags do not balance")
        text = self.text
        source.reread(text[end.length + len(closing) :])
        return text[: end.length]

    def _only_end(self) -> _PossibleEnd:
        """Return the only possible end; raises Malformed if there are several."""
        balanced = [end for end in self._ends if end.is_balanced]
        first = balanced[0] if balanced else self._ends[0]
        for end in self._ends:
            # After the first end come whole calls with text between them, so a later end is in one of those.
            is_in_later_call = (
                end.call_count > first.call_count and end.open_call_count == first.open_call_count
            )
            if end is not first and (end.is_balanced or not is_in_later_call):
                raise Malformed("an argument could end in several places")
        return first


@dataclasses.dataclass(frozen=True, slots=True)
class _PossibleEnd:
    """A closing tag that structure follows, although tags are open or text may follow."""

    length: int
    """Characters of the value before it."""
    is_balanced: bool
    call_count: int
    """How many tags begin a call in the value before it."""
    open_call_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Patterns:
    """The compiled patterns of a notation."""

    call_open: Any
    argument_open: Any
    tag_name: Any
    """The name in a tag that opens a value, after the tag's beginning."""
    named_before: Any
    """The name, if it has a tag of its own before the one that opens a value."""
    strict: Any
    """Structure after a closing tag, with no text after it."""
    cut: Any
    """The same if the output was cut off, so that its end proves nothing."""
    loose: Any
    """The end of a call."""
    end: Any
    """The end of a section."""


_CDATA = regex.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", regex.DOTALL)


@functools.cache
def _patterns(notation: TagCalls) -> _Patterns:
    starts = _any_of(*notation.starts)
    ends = _any_of(*notation.ends)
    argument, call = _unnamed(notation.argument_open), _unnamed(notation.call_open)
    close = regex.escape(notation.call_close)
    behind = rf"{ends}\s{{0,999}}(?:{starts}"
    another = rf"{call}|" if notation.call_close else ""
    unended = "|$" if notation.call_close else ""
    return _Patterns(
        call_open=regex.compile(_GAP + notation.call_open),
        argument_open=regex.compile(_GAP + notation.argument_open),
        tag_name=regex.compile(r"""["']?(?P<name>[^"'<>\s]{1,200})"""),
        named_before=regex.compile(rf"{notation.argument_open}$"),
        strict=regex.compile(rf"{_GAP}(?:{argument}|{close}{_GAP}(?:{another}{behind}|$){unended}))"),
        cut=regex.compile(rf"{_GAP}(?:{argument}|{close}{_GAP}(?:{another}{behind})))"),
        end=regex.compile(rf"{_GAP}{ends}"),
        loose=regex.compile(rf"{_GAP}{close}{_GAP}{ends}"),
    )


def _any_of(*texts: str) -> str:
    return f"(?:{'|'.join(map(regex.escape, texts))})"


def _unnamed(pattern: str) -> str:
    """Return a pattern without group names, so that it can be part of another one."""
    return str(regex.sub(r"\(\?P<\w+>", "(?:", pattern))
