"""Reply format: how a model marks its reasoning and its tool calls in the text it writes, and how that was
found."""

from __future__ import annotations

import dataclasses

from icehouse_server.domain.model import ReplyFormatInfo
from icehouse_server.text.replies.layouts import ChannelReply, MarkedReply
from icehouse_server.text.replies.notation import Notation


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """How the models of one family write replies, as data.

    Callers are shown `name`; `models` and `tested_with` are for the docs.
    """

    name: str = ""
    models: str = ""
    notation: Notation | None = None
    """Of calls between text; None where `layout` says all."""
    own_call_start: str = ""
    """What each call begins with in a template's text, markers of a section included, where that is not the
    notation's first start."""
    own_call_end: str | None = None
    """What its text ends with, where that is not the notation's first end; empty where the end of the output
    does."""
    dropped: tuple[str, ...] = ()
    """Markers around what is said."""
    layout: ChannelReply | None = None
    """Of replies that are not text with markers in it."""
    thoughts: tuple[str, str] = ("", "")
    """What begins reasoning and what ends it for an answer, with a layout of its own."""
    shown: tuple[str, ...] = ()
    """What a prompt that offers tools says of the notation, all of it, where the template renders no
    calls."""
    tokens: tuple[str, ...] = ()
    """Tokens of a vocabulary that has no other use for them."""
    is_strict: bool = False
    """Its calls can be held to a schema: arguments are JSON."""
    id_form: str = ""
    """How the family names its calls, with {name} and {index}; empty where it takes any id."""
    aliases: tuple[str, ...] = ()
    """Names that tokenizer_config.json may give the notation as its `tool_parser_type`."""
    tested_with: str = ""
    """Models whose own chat template it was found with; others were found with one written for the tests."""

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
        """Texts that a reply's calls need to be seen by."""
        notation = self.notation if self.layout is None else self.layout.notation
        around = () if notation is None else (*notation.starts, *notation.ends)
        return (*around, self.call_start, self.call_end)


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Made once for a model. Strings are empty where the model has no such thing."""

    family: Family = dataclasses.field(default_factory=Family)
    """How its calls are written; without a name where they cannot be read."""
    think_start: str = ""
    think_end: str = ""
    evidence: tuple[str, ...] = ()
    """What it was found by, in words."""
    unread_markers: tuple[str, ...] = ()
    """Tokens that look like markers and that nothing reads."""
    hides_markers: bool = False
    """Whether plain detokenization hides markers of reasoning, which are special tokens then."""
    hides_call_markers: bool = False

    @property
    def layout(self) -> MarkedReply | ChannelReply:
        """How a reply is laid out; the markers of reasoning are for text with markers in it."""
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
        """Whether a reply has parts that are neither thought nor said, tools or not."""
        return self.family.layout is not None or bool(self.family.dropped)

    def hides(self, *, reads_calls: bool) -> bool:
        """Whether markers that matter are hidden by plain detokenization."""
        return self.hides_markers or (reads_calls and self.hides_call_markers)
