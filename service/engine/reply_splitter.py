"""A chat's output to what the model says, thinks and calls. Runs on the rpc thread, one for each output.

The pieces do not depend on how the text was cut: neighbours of one kind, joined, are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from service.domain.reply import Piece, ReasoningPiece, TextPiece
from service.engine.call_stream import CallStream
from service.engine.reply_format import ReplyFormat


class ReplySplitter:
    """Takes an output's text in any pieces. `push` and `finish` return what has become certain."""

    def __init__(
        self,
        *,
        format: ReplyFormat,
        tools: Sequence[dict[str, Any]],
        make_call_id: Callable[[int], str],
        opening: str = "",
        is_reasoning: bool = False,
    ) -> None:
        self._format = format
        self._tools = tools
        self._make_call_id = make_call_id
        self._machine = format.make_machine(bool(tools), "reasoning" if is_reasoning else "")
        self._section: CallStream | None = None
        self._next_call_index = 0
        self._readable_call_count = 0
        self._early: list[Piece] = []
        self._early = self.push(opening)
        """Pieces of the text that the prompt ended with; told with the first that follow."""

    @property
    def has_calls(self) -> bool:
        """Whether a call that can be read has ended."""
        return self._readable_call_count > 0

    def push(self, text: str) -> list[Piece]:
        """Add text."""
        pieces = self._take_early()
        for state, segment in self._machine.split(text):
            pieces += self._take(state, segment)
        return pieces

    def finish(self) -> list[Piece]:
        """End the output: whatever was held back is what it seemed to be."""
        pieces = self._take_early()
        state, held = self._machine.flush()
        pieces += self._take(state, held)
        # Without an end marker the end of the output is the end of the section.
        return pieces + self._end_section(has_end=False)

    def _take_early(self) -> list[Piece]:
        early, self._early = self._early, []
        return early

    def _take(self, state: str | None, text: str) -> list[Piece]:
        if state == "tool":
            if self._section is None:
                self._section = CallStream(
                    format=self._format,
                    tools=self._tools,
                    first_index=self._next_call_index,
                    make_id=self._make_call_id,
                )
            return self._section.push(text)
        pieces = self._end_section(has_end=True)
        if text and state == "reasoning":
            pieces.append(ReasoningPiece(text))
        elif text and state == "normal":
            pieces.append(TextPiece(text))
        return pieces

    def _end_section(self, *, has_end: bool) -> list[Piece]:
        if self._section is None:
            return []
        section, self._section = self._section, None
        pieces = section.finish(has_end=has_end)
        self._readable_call_count += section.call_count
        self._next_call_index = section.next_index
        return pieces
