"""Reply format: how a model marks reasoning and calls in the text that it writes, and how that is read.

Most models write text with reasoning and calls between markers. Others write messages, each with a header
that names its recipient. gpt-oss (harmony) reasons on one channel, answers on another, and calls a tool by
naming it as the recipient; Functionary and Muse Spark name recipients as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from icehouse_server.domain.model import ReplyFormatInfo
from icehouse_server.text.replies.notation import Notation, ReplyCalls
from icehouse_server.text.values.literals import JsonText
from icehouse_server.text.values.text_source import SPACE, Malformed, Reading, TextSource, TooLong


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFamily:
    """How the models of one family write replies, as data.

    Callers are shown `name`; `models` and `tested_with` are for the docs.
    """

    name: str = ""
    models: str = ""
    notation: Notation | None = None
    """The notation of calls within text; None if `layout` has one."""
    own_call_start: str = ""
    """What each call begins with in the template's text, including markers of a section, if that is not the
    notation's first start."""
    own_call_end: str | None = None
    """What each call ends with, if that is not the notation's first end; empty if the end of the output ends
    it."""
    dropped: tuple[str, ...] = ()
    """Markers around the answer, which are removed."""
    layout: ChannelReply | None = None
    """The layout of replies that are not text with markers in it."""
    thoughts: tuple[str, str] = ("", "")
    """What begins and ends reasoning, if the family has a layout of its own."""
    shown: tuple[str, ...] = ()
    """Texts that a prompt with tools contains, all of them; used if the template renders no calls."""
    tokens: tuple[str, ...] = ()
    """Tokens that a vocabulary has only for this notation."""
    is_strict: bool = False
    """Whether its calls can be held to a schema, because arguments are JSON."""
    id_form: str = ""
    """The form of its call ids, with {name} and {index}; empty if it takes any id."""
    aliases: tuple[str, ...] = ()
    """Names that tokenizer_config.json may give the notation as its `tool_parser_type`."""
    tested_with: str = ""
    """Models whose own chat template the tests use; for other models the tests wrote one."""

    @property
    def call_start(self) -> str:
        """What every call begins with, as the model's template writes it."""
        starts = () if self.notation is None else self.notation.starts
        return self.own_call_start or "".join(starts[:1])

    @property
    def call_end(self) -> str:
        ends = () if self.notation is None else self.notation.ends
        return "".join(ends[:1]) if self.own_call_end is None else self.own_call_end

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Texts that must be visible in a reply for its calls to be found."""
        notation = self.notation if self.layout is None else self.layout.notation
        around = () if notation is None else (*notation.starts, *notation.ends)
        return (*around, self.call_start, self.call_end)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes replies. A string is empty if the model has no such marker."""

    family: ReplyFamily = dataclasses.field(default_factory=ReplyFamily)
    """How its calls are written; a family without a name if they cannot be read."""
    think_start: str = ""
    think_end: str = ""
    evidence: tuple[str, ...] = ()
    """How it was recognized, in words."""
    unread_markers: tuple[str, ...] = ()
    """Tokens that look like markers but that no reader reads."""
    hides_markers: bool = False
    """Whether plain detokenization hides the reasoning markers, because they are special tokens."""
    hides_call_markers: bool = False

    @property
    def layout(self) -> MarkedReply | ChannelReply:
        """How a reply is laid out; the reasoning markers matter only for text with markers in it."""
        family = self.family
        return family.layout or MarkedReply(self.think_start, self.think_end, family.notation, family.dropped)

    @property
    def info(self) -> ReplyFormatInfo:
        """What callers are shown of it."""
        return ReplyFormatInfo(
            self.family.name, self.think_start, self.think_end, self.evidence, self.unread_markers
        )

    @property
    def marks_reasoning(self) -> bool:
        return bool(self.think_start)

    @property
    def marks_calls(self) -> bool:
        return bool(self.family.name)

    @property
    def is_always_read(self) -> bool:
        """Whether a reply has parts that are neither reasoning nor answer, even without tools."""
        return self.family.layout is not None or bool(self.family.dropped)

    def hides(self, *, reads_calls: bool) -> bool:
        """Whether plain detokenization hides markers that matter."""
        return self.hides_markers or (reads_calls and self.hides_call_markers)


class Sink(Protocol):
    """Receives what a layout reads."""

    is_reasoning: bool
    """Whether what comes next is reasoning; the layout sets it."""

    @property
    def calls(self) -> ReplyCalls | None:
        """Receives the calls; None if calls are plain text."""
        ...

    def add_text(self, text: str) -> None: ...
    def add_reasoning(self, text: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class MarkedReply:
    """Text with reasoning and calls between markers."""

    think_start: str = ""
    think_end: str = ""
    notation: Notation | None = None
    dropped: tuple[str, ...] = ()
    """Markers around the answer, which are removed."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that separate the parts of a reply, except those of calls."""
        return [marker for marker in (self.think_start, self.think_end, *self.dropped) if marker]

    def opening(self, prompt: str) -> str:
        """Return the start of the reply that a prompt ends with; a reader is given it first."""
        return ""

    def read(self, source: TextSource, sink: Sink) -> Reading[None]:
        """Read a reply to its end."""
        calls, notation = sink.calls, self.notation
        starts = () if calls is None or notation is None else notation.starts
        in_text = tuple(marker for marker in (self.think_start, *self.dropped, *starts) if marker)
        in_reasoning = tuple(marker for marker in (self.think_end, *starts) if marker)
        has_text = False

        def add_text(text: str) -> None:
            nonlocal has_text
            has_text = has_text or bool(text.strip(SPACE))
            sink.add_text(text)

        while True:
            if (
                not (has_text or sink.is_reasoning)
                and calls is not None
                and notation is not None
                and (yield from notation.begins_bare(source, calls))
            ):
                yield from self._section(source, sink, "")
                has_text = True
                continue
            if sink.is_reasoning:
                marker = yield from source.until(in_reasoning, sink.add_reasoning)
            else:
                marker = yield from source.until(in_text, add_text)
            if not marker:
                return
            if marker in starts:
                yield from self._section(source, sink, marker)
                has_text = has_text or not sink.is_reasoning
            elif marker not in self.dropped:
                sink.is_reasoning = marker == self.think_start

    def _section(self, source: TextSource, sink: Sink, marker: str) -> Reading[None]:
        """Read a section of calls. A call ends reasoning; a marker that is only mentioned in it does not."""
        calls, notation = sink.calls, self.notation
        assert calls is not None and notation is not None
        was_reasoning = sink.is_reasoning
        is_ambiguous = was_reasoning or marker in notation.ambiguous_starts
        if is_ambiguous and not (yield from notation.looks_like_call(source, calls, marker)):
            (sink.add_reasoning if was_reasoning else sink.add_text)(marker)
            return
        sink.is_reasoning = False
        reading = notation.read(source, calls, marker)
        is_good, _ = yield from _read_section(source, calls, marker, reading=reading, ends=notation.ends)
        sink.is_reasoning = was_reasoning and not is_good


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelReply:
    """Messages with headers. Patterns are of the package `regex` and bound all repetitions."""

    header: Any
    """Matches a whole header. Text without a header is the answer."""
    message_ends: tuple[str, ...]
    """What ends a message, before the next header."""
    header_starts: tuple[str, ...]
    """What begins a header; it ends a message as well."""
    reasoning: Any = None
    """Matches in the header of reasoning."""
    call: Any = None
    """Matches in the header of a call; its group `name` is the tool."""
    notation: Notation | None = None
    """Reads sections of calls inside messages."""
    needs_offer: bool = False
    """Whether a header counts only if it names the user or a tool on offer; anything else is text."""
    user_recipient: str = ""
    """The recipient that means the user."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.message_ends, *self.header_starts)

    def opening(self, prompt: str) -> str:
        """Return the header of the message that the prompt ends within, "" if it ends before a header."""
        start_index = max((prompt.rfind(start) for start in self.header_starts[:1]), default=-1)
        match = self.header.match(prompt, start_index) if start_index >= 0 else None
        if match is None or any(end in prompt[match.end() :] for end in self.message_ends):
            return ""
        return str(match[0])

    def read(self, source: TextSource, sink: Sink) -> Reading[None]:
        """Read a reply to its end."""
        while True:
            header = yield from self._header(source, sink)
            if header is None:
                return
            source.take(len(header))
            call = None if self.call is None else self.call.search(header)
            name = None if call is None or call["name"] == self.user_recipient else str(call["name"])
            if name is not None and sink.calls is not None:
                sink.is_reasoning = False
                reading = self._call(source, sink.calls, name)
                _, ending = yield from _read_section(
                    source, sink.calls, header, reading=reading, ends=self.markers
                )
            else:
                sink.is_reasoning = self.reasoning is not None and self.reasoning.search(header) is not None
                if name is not None:
                    sink.add_text(header)
                ending = yield from self._message(source, sink)
            if not ending:
                return
            if ending in self.header_starts:
                source.put_back(ending)

    def _header(self, source: TextSource, sink: Sink) -> Reading[str | None]:
        """Return the next header, "" if text comes next, None at the end."""
        match = yield from source.ahead(self.header)
        if match is not None:
            name = match.groupdict().get("name")
            is_known = (
                not self.needs_offer
                or name == self.user_recipient
                or sink.calls is None
                or sink.calls.offers(name)
            )
            return str(match[0]) if is_known else ""
        if source.has_ended and self.header.match(source.rest, partial=True) is not None:
            source.take(len(source.rest))
        return "" if (yield from source.peek()) else None

    def _message(self, source: TextSource, sink: Sink) -> Reading[str]:
        """Read a message of reasoning or text; return what ended it."""
        sections = () if self.notation is None or sink.calls is None else self.notation.starts
        emit = sink.add_reasoning if sink.is_reasoning else sink.add_text
        while True:
            marker = yield from source.until((*self.markers, *sections), emit)
            if marker in sections:
                assert self.notation is not None and sink.calls is not None
                reading = self.notation.read(source, sink.calls, marker)
                yield from _read_section(source, sink.calls, marker, reading=reading, ends=self.notation.ends)
            elif marker in self.header_starts:
                source.put_back(marker)
                header = yield from self._header(source, sink)
                if header is None:
                    return ""
                source.take(len(marker))
                if header:
                    return marker
                emit(marker)
            else:
                return marker

    def _call(self, source: TextSource, calls: ReplyCalls, name: str) -> Reading[str]:
        """Read the arguments of a call; return what ended them."""
        calls.begin_call()
        calls.name_tool(name)
        text = JsonText(source, self.markers)
        yield from source.space()
        is_empty = bool((yield from source.sees(*self.markers)))
        if is_empty:
            calls.add_arguments("{}")
        elif (yield from source.peek()) != "{":
            raise Malformed("its arguments are not a JSON object")
        else:
            yield from text.value(calls.add_arguments)
        yield from source.space()
        ending = yield from source.accepts(*self.markers)
        if not ending and (yield from source.peek()):
            raise Malformed("something follows the arguments")
        calls.end_call(is_repaired=is_empty or text.is_repaired)
        return ending


def _read_section(
    source: TextSource, calls: ReplyCalls, marker: str, *, reading: Reading[str | None], ends: Sequence[str]
) -> Reading[tuple[bool, str]]:
    """Read a section of calls to its end; if it is malformed, skip to one of `ends`.

    Return whether it could be read, and the text that ended it.
    """
    calls.begin_section(marker)
    try:
        result = yield from reading
    except Malformed as error:
        ending = ""
        if ends and not isinstance(error, TooLong):
            with contextlib.suppress(TooLong):
                ending = yield from source.until(ends, lambda _: None)
        return calls.end_section(problem=str(error)), ending
    return calls.end_section(), result or ""
