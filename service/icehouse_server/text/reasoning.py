"""Reasoning tokens of a reply: which of them the model thinks with, by the text that they turn into.

Markers are looked for in the text and not among the tokens, as what tells the reply's parts apart does: the
same marker can be drawn as other tokens than the tokenizer would have chosen.
"""

from __future__ import annotations

import dataclasses

from icehouse_server.text.reply_format import REASONING, ReplyFormat, TextMachine


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

    def meter(self) -> ReasoningMeter:
        """Return a meter at the beginning of an output."""
        machine = self.format.make_machine(self.reads_calls, REASONING if self.is_open else "")
        return ReasoningMeter(machine, opening=self.opening)


class ReasoningMeter:
    """Counts one output's tokens between its markers. A token counts where its first character lies, or its
    last, where the text of tokens before comes with it."""

    def __init__(self, machine: TextMachine, *, opening: str) -> None:
        self._machine = machine
        self._counted = 0
        self._length = len(opening)
        """Characters so far."""
        self._waiting: list[int] = []
        """Where those tokens begin whose text may be the beginning of a marker, or has not come yet."""
        self.is_open = self._machine.split(opening)[-1][0] == REASONING
        """Whether the next token is drawn within reasoning."""
        self._held_length = self._machine.held_length

    @property
    def token_count(self) -> int:
        """Tokens so far; what may become a marker counts until it is one."""
        return self._counted + (len(self._waiting) if self.is_open else 0)

    def push(self, text: str) -> None:
        """Take one more token with the text that became certain with it, which may be empty."""
        start = self._length - self._held_length
        has_company = self._length in self._waiting[-1:]  # a token whose text comes with this one's
        self._waiting.append(self._length + max(0, len(text) - 1) if has_company else self._length)
        self._length += len(text)
        segments = self._machine.split(text)
        self._held_length = self._machine.held_length
        end = self._length - self._held_length
        (first_state, first), (last_state, last) = segments[0], segments[-1]
        self.is_open = last_state == REASONING
        reasoned = []
        if first_state == REASONING:
            reasoned.append(range(start, end if len(segments) == 1 else start + len(first)))
        if self.is_open:
            reasoned.append(range(end - len(last), end))
        judged = [place for place in self._waiting if place < end]
        self._waiting = [place for place in self._waiting if place >= end]
        self._counted += sum(any(place in span for span in reasoned) for place in judged)
