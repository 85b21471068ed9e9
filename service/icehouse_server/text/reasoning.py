"""Reasoning tokens of a reply: which of them the model thinks with, by the text that they turn into.

Markers are looked for in the text and not among the tokens, as what tells the reply's parts apart does: the
same marker can be drawn as other tokens than the tokenizer would have chosen.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.text.replies.reply_calls import ReplyCalls
from icehouse_server.text.replies.reply_format import ReplyFormat
from icehouse_server.text.values.text_source import TextSource


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyReasoning:
    """How the reply to one conversation thinks. Never changes; any thread may start meters of it."""

    format: ReplyFormat
    reads_calls: bool
    opening: str = ""
    """Text of the reply that the prompt ends with."""
    is_open: bool = False
    """The prompt ends within reasoning."""
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    """The marker's tokens; empty where nothing that could be forced ends this model's reasoning."""

    def within(self, vocabulary_size: int) -> ReplyReasoning:
        """Return it for a model with so many tokens: a marker that it cannot draw has none."""
        start, end = (
            ids if max(ids, default=0) < vocabulary_size else ()
            for ids in (self.start_token_ids, self.end_token_ids)
        )
        return dataclasses.replace(self, start_token_ids=start, end_token_ids=end)

    def meter(self) -> ReasoningCounter:
        """Return a meter at the beginning of an output."""
        return ReasoningCounter(
            ReasoningSpans(
                format=self.format,
                reads_calls=self.reads_calls,
                opening=self.opening,
                is_reasoning=self.is_open,
            ),
            opening_length=len(self.opening),
        )


class ReasoningCounter:
    """Counts one output's tokens between its markers. A token counts where its first character lies, or its
    last, where the text of tokens before comes with it."""

    def __init__(self, spans: ReasoningSpans, *, opening_length: int) -> None:
        self._spans = spans
        self._counted = 0
        self._length = opening_length
        """Characters so far."""
        self._waiting: list[int] = []
        """Where those tokens begin whose text may be the beginning of a marker, or has not come yet."""

    @property
    def is_open(self) -> bool:
        """Whether the next token is drawn within reasoning."""
        return self._spans.is_reasoning

    @property
    def token_count(self) -> int:
        """Tokens so far; what may become a marker counts until it is one."""
        return self._counted + (len(self._waiting) if self.is_open else 0)

    def push(self, text: str) -> None:
        """Take one more token with the text that became certain with it, which may be empty."""
        has_company = self._length in self._waiting[-1:]  # a token whose text comes with this one's
        self._waiting.append(self._length + max(0, len(text) - 1) if has_company else self._length)
        self._length += len(text)
        reasoned = self._spans.push(text)
        end = self._spans.certain_length
        judged = [place for place in self._waiting if place < end]
        self._waiting = [place for place in self._waiting if place >= end]
        self._counted += sum(any(place in span for span in reasoned) for place in judged)


class ReasoningSpans:
    """Where an output thinks: follows it as ReplySplitter does, and checks no calls."""

    def __init__(self, *, format: ReplyFormat, reads_calls: bool, opening: str, is_reasoning: bool) -> None:
        self._source = TextSource()
        self.calls = ReplyCalls(self._source) if reads_calls else None
        self.is_reasoning = is_reasoning
        """Whether what comes next is thought, as far as the text tells."""
        self._spans: list[range] = []
        self._reading = format.layout.read(self._source, self)
        self.push(opening)

    @property
    def certain_length(self) -> int:
        """Characters of which it is known what they are."""
        return self._source.read_length

    def push(self, text: str) -> list[range]:
        """Add text; return the places of the thoughts that became certain."""
        if text:
            self._source.push(text)
            next(self._reading, None)
        spans, self._spans = self._spans, []
        return spans

    def say(self, text: str) -> None:
        """Pass over text."""

    def think(self, text: str) -> None:
        """Note where a thought stands: its text was read last."""
        end = self._source.read_length
        self._spans.append(range(end - len(text), end))
