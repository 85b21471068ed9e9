"""A rendered conversation to tokens, with the assistant's turns as they were drawn. Pure.

A model may draw tokens that the tokenizer would not have chosen for the same text. A cached prefix is
a prefix of tokens, so a turn that is tokenized anew ends the match there; put back as it was drawn it
does not. Where a turn's tokens do not spell what the template wrote, the text counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

_HEADER_TOKEN_COUNT = 8
"""Tokens decoded before a turn's own, so that its leading space survives."""


@dataclasses.dataclass(frozen=True, slots=True)
class TurnTokens:
    """Puts drawn turns back. `encode` adds no special tokens, `decode` hides none."""

    encode: Encode
    decode: Decode
    eos_token_ids: frozenset[int]

    def tokens(self, text: str, *, turns: Sequence[Sequence[int]], headers: Sequence[str]) -> list[int]:
        """Return the tokens of `text`, in which the drawn `turns` follow one of `headers`, in order.

        `headers` are ways in which the template begins a turn, the likeliest first. Whatever is
        returned decodes to the same text as the plain encoding does.
        """
        plain = self.encode(text)
        spliced = self._spliced(text, turns=turns, headers=[header for header in headers if header])
        if spliced is None or self.decode(spliced) != self.decode(plain):
            return plain
        return spliced

    def _spliced(
        self, text: str, *, turns: Sequence[Sequence[int]], headers: Sequence[str]
    ) -> list[int] | None:
        tokens: list[int] = []
        position = 0
        for turn in turns:
            drawn = self._without_end(turn)
            start = length = -1
            for header in headers:
                spelled = self._spelled(drawn, header)
                found = text.find(header + spelled, position) if spelled else -1
                if found >= 0:
                    start, length = found + len(header), len(spelled)
                    break
            if start < 0:
                continue
            tokens += self.encode(text[position:start])
            tokens += drawn
            position = start + length
        if not position:
            return None
        return tokens + self.encode(text[position:])

    def _without_end(self, turn: Sequence[int]) -> list[int]:
        """Return the turn without the tokens that ended it: the template writes its own end."""
        drawn = list(turn)
        while drawn and drawn[-1] in self.eos_token_ids:
            drawn.pop()
        return drawn

    def _spelled(self, drawn: Sequence[int], header: str) -> str:
        before = self.encode(header)[-_HEADER_TOKEN_COUNT:]
        known = self.decode(before)
        whole = self.decode([*before, *drawn])
        return whole[len(known) :] if whole.startswith(known) else ""
