"""Family of models: how their replies are written, as data. A model's is found by what its template
renders."""

from __future__ import annotations

import dataclasses

from icehouse_server.text.replies.core.channel_reply import ChannelReply
from icehouse_server.text.replies.core.marked_reply import MarkedReply
from icehouse_server.text.replies.core.reply_format import Layout, Notation


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """An entry. `name` is told to callers, `models` and `tested_with` to readers of the docs."""

    name: str
    models: str
    call_start: str
    """What each call begins with in a template's text, markers of a section included."""
    notation: Notation | None = None
    """Of calls between text; None where `layout` says all."""
    call_end: str = ""
    """What its text ends with; empty where the end of the output does."""
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

    def layout_of(self, think_start: str, think_end: str) -> Layout:
        """Return the layout of a reply; the markers of reasoning are for text with markers in it."""
        return self.layout or MarkedReply(think_start, think_end, self.notation, self.dropped)

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Texts that a reply's calls need to be seen by."""
        notation = self.notation if self.layout is None else self.layout.notation
        around = () if notation is None else (*notation.starts, *notation.ends)
        return (*around, self.call_start, self.call_end)
