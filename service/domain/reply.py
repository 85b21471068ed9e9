"""What a chat's output is made of. The pieces of one output come in the order in which it was written."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TextPiece:
    """What the model says."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """What the model thinks before it speaks."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of tool call `index`. The first of a call has its id and name and no arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments_json: str = ""
    is_withdrawn: bool = False
    """The call turned out to be malformed: what came for this index is void."""


@dataclasses.dataclass(frozen=True, slots=True)
class MalformedPiece:
    """Text that began as a tool call and cannot be read as one; `problem` says why, in words."""

    text: str
    problem: str


Piece = TextPiece | ReasoningPiece | CallPiece | MalformedPiece
