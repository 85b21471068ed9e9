"""Reasoning tokens of a reply, recognized by the text that they become.

Markers are searched for in the text, not among the tokens, as in ReplySplitter: a model may spell a marker
with other tokens than the tokenizer would choose.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.text.replies.notation import ReplyCalls
from icehouse_server.text.replies.reply_format import ReplyFormat
from icehouse_server.text.values.text_source import TextSource


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyReasoning:
    """How the reply to one conversation marks reasoning. Immutable; any thread may start meters from it."""

    format: ReplyFormat
    reads_calls: bool
    opening: str = ""
    """The start of the reply, with which the prompt ends."""
    is_open: bool = False
    """Whether the prompt ends within reasoning."""
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    """Tokens of the end marker; empty if no tokens spell it, so it cannot be forced."""

    def within(self, vocabulary_size: int) -> ReplyReasoning:
        """Return the same for a vocabulary of this size; markers that the model cannot draw get no tokens."""
        start, end = (
            ids if max(ids, default=0) < vocabulary_size else ()
            for ids in (self.start_token_ids, self.end_token_ids)
        )
        return dataclasses.replace(self, start_token_ids=start, end_token_ids=end)

    def meter(self) -> ReasoningCounter:
        """Return a meter at the beginning of an output."""
        return ReasoningCounter(self)


class ReasoningCounter:
    """Counts the tokens of one output that belong to reasoning.

    It reads the output as ReplySplitter does, but checks no calls. A token counts as reasoning if its first
    character is. If it arrives with text of earlier tokens, its last character decides.
    """

    def __init__(self, reasoning: ReplyReasoning) -> None:
        self._source = TextSource()
        self.calls = ReplyCalls(self._source) if reasoning.reads_calls else None
        self.is_reasoning = reasoning.is_open
        self._spans: list[range] = []
        self._reading = reasoning.format.layout.read(self._source, self)
        self._count = 0
        self._length = 0
        """Characters so far."""
        self._pending: list[int] = []
        """Start positions of tokens that are not counted yet: their text may still begin a marker."""
        self.read(reasoning.opening)

    @property
    def is_open(self) -> bool:
        """Whether the next token is drawn within reasoning."""
        return self.is_reasoning

    @property
    def token_count(self) -> int:
        """Tokens of reasoning so far, including those that may still turn out to be a marker."""
        return self._count + (len(self._pending) if self.is_open else 0)

    def push(self, text: str) -> None:
        """Take one more token and the text that it made certain, which may be empty."""
        shares_text = self._length in self._pending[-1:]  # with the token before
        self._pending.append(self._length + max(0, len(text) - 1) if shares_text else self._length)
        spans = self.read(text)
        end = self._source.read_length
        certain = [position for position in self._pending if position < end]
        self._pending = [position for position in self._pending if position >= end]
        self._count += sum(any(position in span for span in spans) for position in certain)

    def read(self, text: str) -> list[range]:
        """Add text; return the spans of reasoning that became certain, in characters."""
        self._length += len(text)
        if text:
            self._source.push(text)
            next(self._reading, None)
        spans, self._spans = self._spans, []
        return spans

    def add_text(self, text: str) -> None:
        """Ignore text of the answer."""

    def add_reasoning(self, text: str) -> None:
        """Take a span of reasoning: the text that was read last."""
        end = self._source.read_length
        self._spans.append(range(end - len(text), end))
