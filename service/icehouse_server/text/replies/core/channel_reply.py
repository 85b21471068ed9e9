"""Channel reply: the layout of models that write messages with a header each, which says to whom it is.

gpt-oss (harmony) thinks on one channel, answers on another and calls by naming a recipient; Functionary and
Muse Spark name recipients as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from icehouse_server.text.replies.core.marked_reply import read_section
from icehouse_server.text.replies.core.reply_format import Notation, Section, Sink
from icehouse_server.text.values.json_text import JsonText
from icehouse_server.text.values.source import Malformed, Reading, Source, TooLong


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelReply:
    """The layout, by its markers. Patterns are of the package `regex` and bound what repeats in them."""

    header: Any
    """A whole header. Where none is, what follows is said, as if it had one."""
    message_ends: tuple[str, ...]
    """What ends a message; a header follows."""
    header_starts: tuple[str, ...]
    """What begins a header, in the place of the end of a message too."""
    thought: Any = None
    """Searched in a header: that of thoughts."""
    call: Any = None
    """Searched in a header: that of a call, with a group `name`."""
    notation: Notation | None = None
    """Reads sections of calls inside of messages."""
    needs_offer: bool = False
    """A header that names neither `said` nor a tool on offer is text: nothing else tells them apart."""
    said: str = ""

    @property
    def markers(self) -> Sequence[str]:
        return (*self.message_ends, *self.header_starts)

    def opening(self, prompt: str) -> str:
        """Return the header of the message that the prompt ends in, "" where it ends before one."""
        place = max((prompt.rfind(start) for start in self.header_starts[:1]), default=-1)
        match = self.header.match(prompt, place) if place >= 0 else None
        if match is None or any(end in prompt[match.end() :] for end in self.message_ends):
            return ""
        return str(match[0])

    def read(self, source: Source, sink: Sink) -> Reading[None]:
        """Read a reply to its end."""
        while True:
            header = yield from self._header(source, sink)
            if header is None:
                return
            source.take(len(header))
            call = None if self.call is None else self.call.search(header)
            name = None if call is None or call["name"] == self.said else str(call["name"])
            if name is not None and sink.calls is not None:
                sink.is_reasoning = False
                ending = yield from self._call(source, sink.calls, header, name)
            else:
                sink.is_reasoning = self.thought is not None and self.thought.search(header) is not None
                if name is not None:
                    sink.say(header)
                ending = yield from self._message(source, sink)
            if not ending:
                return
            if ending in self.header_starts:
                source.give_back(ending)

    def _header(self, source: Source, sink: Sink) -> Reading[str | None]:
        """Return the header that comes next, "" where text does, None where nothing comes any more."""
        match = yield from source.ahead(self.header)
        if match is not None:
            name = match.groupdict().get("name")
            is_known = (
                not self.needs_offer or name == self.said or sink.calls is None or sink.calls.offers(name)
            )
            return str(match[0]) if is_known else ""
        if source.has_ended and self.header.match(source.rest, partial=True) is not None:
            source.take(len(source.rest))
        return "" if (yield from source.peek()) else None

    def _message(self, source: Source, sink: Sink) -> Reading[str]:
        """Read what is thought or said; return what ended it."""
        sections = () if self.notation is None or sink.calls is None else self.notation.starts
        tell = sink.think if sink.is_reasoning else sink.say
        while True:
            marker = yield from source.until((*self.message_ends, *self.header_starts, *sections), tell)
            if marker in sections:
                assert self.notation is not None and sink.calls is not None
                yield from read_section(source, sink.calls, self.notation, marker)
            elif marker in self.header_starts:
                source.give_back(marker)
                header = yield from self._header(source, sink)
                if header is None:
                    return ""
                source.take(len(marker))
                if header:
                    return marker
                tell(marker)
            else:
                return marker

    def _call(self, source: Source, calls: Section, header: str, name: str) -> Reading[str]:
        """Read the arguments of a call; return what ended them."""
        ends = (*self.message_ends, *self.header_starts)
        ending = ""
        calls.begin_section(header)
        try:
            calls.start()
            calls.name(name)
            text = JsonText(source, ends)
            yield from source.space()
            is_empty = bool((yield from source.sees(*ends)))
            if is_empty:
                calls.argue("{}")
            elif (yield from source.peek()) != "{":
                raise Malformed("its arguments are no JSON object")
            else:
                yield from text.value(calls.argue)
            yield from source.space()
            ending = yield from source.accepts(*ends)
            if not ending and (yield from source.peek()):
                raise Malformed("something follows the arguments")
            calls.end(is_repaired=is_empty or text.is_repaired)
            calls.end_section()
        except Malformed as error:
            if not isinstance(error, TooLong):
                with contextlib.suppress(TooLong):
                    ending = yield from source.until(ends, lambda _: None)
            calls.end_section(problem=str(error))
        return ending
