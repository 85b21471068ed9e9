"""Reply format: how a model marks its reasoning and its tool calls in the text it writes, and how that was
found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from icehouse_server.domain.model import ReplyFormatInfo
from icehouse_server.text.replies.core.calls import Calls
from icehouse_server.text.values.source import Reading, Source


class Section(Calls, Protocol):
    """Calls, and where a section of them begins and ends."""

    @property
    def good_count(self) -> int:
        """Calls that count."""
        ...

    def begin_section(self, marker: str) -> None: ...
    def end_section(self, *, problem: str = "") -> bool: ...


class Sink(Protocol):
    """What a layout tells of a reply."""

    is_reasoning: bool
    """Whether what comes next is thought; the layout keeps it."""

    @property
    def calls(self) -> Section | None:
        """Takes the calls; None where they are text."""
        ...

    def say(self, text: str) -> None: ...
    def think(self, text: str) -> None: ...


class Notation(Protocol):
    """How calls are written: reads one section of them, to its end."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Texts that begin a section; empty where a reply begins with the calls themselves."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a section, for going on behind one that cannot be read."""
        ...

    def begins(self, source: Source, calls: Calls) -> Reading[bool]:
        """Tell whether the text ahead, with which a reply begins, is calls without a start; reads nothing."""
        ...

    @property
    def wary_starts(self) -> tuple[str, ...]:
        """Starts that text may hold as well: they count where a call follows."""
        ...

    def continues(self, source: Source, calls: Calls, marker: str) -> Reading[bool]:
        """Tell whether what follows a start looks like a call, and not like text about the start."""
        ...

    def read(self, source: Source, calls: Calls, marker: str) -> Reading[None]:
        """Read what follows `marker`, the end included; raises Malformed."""
        ...


class Layout(Protocol):
    """How a reply is laid out: what of it is thought, said and called."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that tell parts apart, those of calls left out."""
        ...

    def opening(self, prompt: str) -> str:
        """Return what of the reply's structure a prompt ends with, for the reader to begin with."""
        ...

    def read(self, source: Source, sink: Sink) -> Reading[None]:
        """Read a reply to its end."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Made once for a model. Strings are empty where the model has no such thing."""

    layout: Layout
    family: str = ""
    """The name of the notation of its calls; empty where they cannot be read."""
    evidence: tuple[str, ...] = ()
    """What it was found by, in words."""
    unread_markers: tuple[str, ...] = ()
    """Tokens that look like markers and that nothing reads."""
    think_start: str = ""
    think_end: str = ""
    call_start: str = ""
    """What every call begins with, as the model's template writes it."""
    call_end: str = ""
    id_form: str = ""
    """How the model names its calls, with {name} and {index}; empty where it takes any id."""
    hides_markers: bool = False
    """Whether plain detokenization hides markers of reasoning, which are special tokens then."""
    hides_call_markers: bool = False
    is_always_read: bool = False
    """A reply has parts that are neither thought nor said, tools or not."""

    @property
    def info(self) -> ReplyFormatInfo:
        """What is told of it."""
        return ReplyFormatInfo(
            self.family, self.think_start, self.think_end, self.evidence, self.unread_markers
        )

    @property
    def marks_reasoning(self) -> bool:
        return bool(self.think_start)

    @property
    def marks_calls(self) -> bool:
        return bool(self.family)

    def hides(self, *, reads_calls: bool) -> bool:
        """Whether markers that matter are hidden by plain detokenization."""
        return self.hides_markers or (reads_calls and self.hides_call_markers)
