"""Reply format: how a model marks its reasoning and its tool calls in the text it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ParseCalls = Callable[[str, list[dict[str, Any]] | None], Any]
"""mlx-lm's parser of one call's text; raises what it likes. The second argument are the tools on offer."""

REASONING = "reasoning"
"""The state of a text in which the model thinks."""


class TextMachine:
    """Follows a text through its states: "normal", "reasoning", "tool", and states whose text is dropped.

    `split` and `flush` are mlx-lm's, which hand the next `state` back.
    """

    def __init__(self, state: Any, *, split: Callable[..., Any], flush: Callable[..., Any]) -> None:
        self._state = state
        self._split = split
        self._flush = flush

    def split(self, text: str) -> Sequence[tuple[str | None, str]]:
        """Return the text that is certain now, in pieces, each with its state."""
        self._state, segments = self._split(self._state, text)
        return list(segments)

    @property
    def held_length(self) -> int:
        """Characters that are held back, since they may become a marker."""
        _, held, _ = self._flush(self._state)  # returns the state that would be next and changes none
        return len(held)

    def flush(self) -> tuple[str | None, str]:
        """Return what was held back, at the end of the text."""
        self._state, held, name = self._flush(self._state)
        return name, held


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Made once for a model. Strings are empty where the model has no such thing."""

    think_start: str
    think_end: str
    call_start: str
    call_end: str
    """Empty too where the end of the output is the end of the calls."""
    parser_name: str
    parse: ParseCalls | None
    make_machine: Callable[[bool, str], TextMachine]
    """`make_machine(with_tools, state)`: a machine in its initial state, or in the one named."""
    hidden_markers: Mapping[bool, bool]
    """Whether markers are special tokens, which plain detokenization hides: without tools, with tools."""
    initial_state: str = ""
    """Where an output begins if not in the text; empty for most."""

    @property
    def marks_reasoning(self) -> bool:
        return bool(self.think_start)

    @property
    def marks_calls(self) -> bool:
        return self.parse is not None
