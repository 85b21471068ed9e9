"""Reasoning tokens of a reply: which tokens the model reasons with, by the text that they become.

Markers are looked for in the text and not among the tokens, as in ReplySplitter: a model may draw a marker as
other tokens than the tokenizer would choose.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.text.replies.checked_calls import ReplyCalls
from icehouse_server.text.replies.reply_format import ReplyFormat
from icehouse_server.text.values.text_source import TextSource


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyReasoning:
    """How the reply to one conversation marks reasoning. Never changes; any thread may start meters of it."""

    format: ReplyFormat
    reads_calls: bool
    opening: str = ""
    """Text of the reply that the prompt ends with."""
    is_open: bool = False
    """The prompt ends within reasoning."""
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    """Tokens of the end marker; empty where no tokens spell it, so that it cannot be forced."""

    def within(self, vocabulary_size: int) -> ReplyReasoning:
        """Return the same for a model with so many tokens; markers that it cannot draw get no tokens."""
        start, end = (
            ids if max(ids, default=0) < vocabulary_size else ()
            for ids in (self.start_token_ids, self.end_token_ids)
        )
        return dataclasses.replace(self, start_token_ids=start, end_token_ids=end)

    def meter(self) -> ReasoningCounter:
        """Return a meter at the beginning of an output."""
        return ReasoningCounter(self)


class ReasoningCounter:
    """Counts the tokens of one output that lie within reasoning.

    A token lies where its first character does. If text of earlier tokens comes with it, its last one counts.
    """

    def __init__(self, reasoning: ReplyReasoning) -> None:
        self._spans = ReasoningSpans(reasoning)
        self._counted = 0
        self._length = len(reasoning.opening)
        """Characters so far."""
        self._waiting: list[int] = []
        """Where tokens begin that are not counted yet: their text has not come, or may begin a marker."""

    @property
    def is_open(self) -> bool:
        """Whether the next token is drawn within reasoning."""
        return self._spans.is_reasoning

    @property
    def token_count(self) -> int:
        """Tokens of reasoning so far; those that may become a marker count until they are one."""
        return self._counted + (len(self._waiting) if self.is_open else 0)

    def push(self, text: str) -> None:
        """Take one more token with the text that became certain with it, which may be empty."""
        shares_text = self._length in self._waiting[-1:]  # with the token before
        self._waiting.append(self._length + max(0, len(text) - 1) if shares_text else self._length)
        self._length += len(text)
        reasoned = self._spans.push(text)
        end = self._spans.certain_length
        judged = [place for place in self._waiting if place < end]
        self._waiting = [place for place in self._waiting if place >= end]
        self._counted += sum(any(place in span for span in reasoned) for place in judged)


class ReasoningSpans:
    """Where an output reasons: read as ReplySplitter reads it, but no calls are checked."""

    def __init__(self, reasoning: ReplyReasoning) -> None:
        self._source = TextSource()
        self.calls = ReplyCalls(self._source) if reasoning.reads_calls else None
        self.is_reasoning = reasoning.is_open
        """Whether what comes next is reasoning, as far as the text says."""
        self._spans: list[range] = []
        self._reading = reasoning.format.layout.read(self._source, self)
        self.push(reasoning.opening)

    @property
    def certain_length(self) -> int:
        """Characters that are known to be reasoning or not."""
        return self._source.read_length

    def push(self, text: str) -> list[range]:
        """Add text; return the spans of reasoning that became certain."""
        if text:
            self._source.push(text)
            next(self._reading, None)
        spans, self._spans = self._spans, []
        return spans

    def say(self, text: str) -> None:
        """Pass over text."""

    def think(self, text: str) -> None:
        """Take a span of reasoning, which is the text that was read last."""
        end = self._source.read_length
        self._spans.append(range(end - len(text), end))
