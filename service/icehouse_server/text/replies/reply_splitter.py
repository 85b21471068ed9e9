"""Reply splitter: what the model says, thinks and calls, apart. On the rpc thread, one for each output.

The pieces do not depend on how the text was cut: once neighbours of one kind are joined, they are always the
same. Calls that the model writes as JSON are emitted as they come, others at their end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from icehouse_server.domain.chat import CallPiece, Piece, ReasoningPiece, TextPiece
from icehouse_server.text.replies.checked_calls import CheckedCalls
from icehouse_server.text.replies.reply_format import ReplyFormat
from icehouse_server.text.values.text_source import TextSource


class ReplySplitter:
    """Takes an output's text in any pieces. `push` and `finish` return what has become certain."""

    def __init__(
        self,
        *,
        format: ReplyFormat,
        tools: Sequence[Mapping[str, Any]],
        make_call_id: Callable[[int], str],
        opening: str = "",
        is_reasoning: bool = False,
    ) -> None:
        self._source = TextSource()
        self._pieces: list[Piece] = []
        self._calls = CheckedCalls(
            source=self._source, tools=tools, make_id=make_call_id, emit=self._pieces.append
        )
        self.calls = self._calls if tools else None
        self.is_reasoning = is_reasoning
        self._reading = format.layout.read(self._source, self)
        self._feed(opening)
        # Pieces of the text that the prompt ended with are emitted with the first that follow.

    @property
    def has_calls(self) -> bool:
        """Whether a call that can be read has ended."""
        return self.good_count > 0

    @property
    def good_count(self) -> int:
        """Calls that could be read so far."""
        return self._calls.good_count

    def push(self, text: str) -> list[Piece]:
        """Add text."""
        self._feed(text)
        return self._emitted()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the output: whatever was held back is what it seemed to be. `is_cut` where it ends at a limit,
        and the model would have gone on."""
        self._source.end(is_cut=is_cut)
        next(self._reading, None)
        return self._emitted()

    def say(self, text: str) -> None:
        """Take text of the layout's."""
        self._pieces.append(TextPiece(text))

    def think(self, text: str) -> None:
        """Take reasoning of the layout's."""
        self._pieces.append(ReasoningPiece(text))

    def _feed(self, text: str) -> None:
        if text:
            self._source.push(text)
            next(self._reading, None)

    def _emitted(self) -> list[Piece]:
        emitted: list[Piece] = []
        for piece in self._pieces:
            if emitted and (joined := _joined(emitted[-1], piece)) is not None:
                emitted[-1] = joined
            else:
                emitted.append(piece)
        self._pieces.clear()
        return emitted


def _joined(first: Piece, second: Piece) -> Piece | None:
    """Return two pieces as one, where they go on with the same; None elsewhere."""
    match first, second:
        case (TextPiece(), TextPiece()):
            return TextPiece(first.text + second.text)
        case (ReasoningPiece(), ReasoningPiece()):
            return ReasoningPiece(first.text + second.text)
        case (CallPiece(), CallPiece()) if first.arguments_json and second.arguments_json:
            arguments = first.arguments_json + second.arguments_json
            return dataclasses.replace(first, arguments_json=arguments)
    return None
