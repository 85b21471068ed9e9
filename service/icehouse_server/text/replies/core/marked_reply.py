"""Marked reply: the layout of most models. Text, with thoughts and calls between markers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from icehouse_server.text.replies.core.reply_format import Notation, Section, Sink
from icehouse_server.text.values.source import SPACE, Malformed, Reading, Source, TooLong


@dataclasses.dataclass(frozen=True, slots=True)
class MarkedReply:
    """The layout, by its markers."""

    think_start: str = ""
    think_end: str = ""
    notation: Notation | None = None
    dropped: tuple[str, ...] = ()
    """Markers around what is said, which nobody wants to see."""

    @property
    def markers(self) -> Sequence[str]:
        return [marker for marker in (self.think_start, self.think_end, *self.dropped) if marker]

    def opening(self, prompt: str) -> str:
        return ""

    def read(self, source: Source, sink: Sink) -> Reading[None]:
        """Read a reply to its end."""
        starts = () if sink.calls is None or self.notation is None else self.notation.starts
        said = tuple(marker for marker in (self.think_start, *self.dropped, *starts) if marker)
        thought = tuple(marker for marker in (self.think_end, *starts) if marker)
        has_spoken = False

        def say(text: str) -> None:
            nonlocal has_spoken
            has_spoken = has_spoken or bool(text.strip(SPACE))
            sink.say(text)

        while True:
            if not (has_spoken or sink.is_reasoning) and (yield from self._begins_bare(source, sink)):
                yield from self._section(source, sink, "")
                has_spoken = True
                continue
            if sink.is_reasoning:
                marker = yield from source.until(thought, sink.think)
            else:
                marker = yield from source.until(said, say)
            if not marker:
                return
            if marker in starts:
                yield from self._section(source, sink, marker)
                has_spoken = has_spoken or not sink.is_reasoning
            elif marker not in self.dropped:
                sink.is_reasoning = marker == self.think_start

    def _begins_bare(self, source: Source, sink: Sink) -> Reading[bool]:
        if sink.calls is None or self.notation is None:
            return False
        return (yield from self.notation.begins(source, sink.calls))

    def _section(self, source: Source, sink: Sink, marker: str) -> Reading[None]:
        """Read calls, and what of them is none. A call ends the thoughts; what they say of a marker does
        not."""
        calls, notation = sink.calls, self.notation
        assert calls is not None and notation is not None
        was_reasoning = sink.is_reasoning
        is_wary = was_reasoning or marker in notation.wary_starts
        if is_wary and not (yield from notation.continues(source, calls, marker)):
            (sink.think if was_reasoning else sink.say)(marker)
            return
        sink.is_reasoning = False
        is_good = yield from read_section(source, calls, notation, marker)
        sink.is_reasoning = was_reasoning and not is_good


def read_section(source: Source, calls: Section, notation: Notation, marker: str) -> Reading[bool]:
    """Read one section of calls to its end, whatever it is; return whether it could be read."""
    calls.begin_section(marker)
    try:
        yield from notation.read(source, calls, marker)
    except Malformed as error:
        problem = str(error)
        if notation.ends and not isinstance(error, TooLong):
            with contextlib.suppress(TooLong):
                yield from source.until(notation.ends, lambda _: None)
        return calls.end_section(problem=problem)
    return calls.end_section()
