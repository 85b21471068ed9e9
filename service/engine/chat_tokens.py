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
"""Tokens decoded before a turn's own."""
_LONGEST_ADDED_TOKEN = 64
"""Characters of the longest special token that is looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class TurnTokens:
    """Puts drawn turns back. `encode` adds no special tokens, `decode` hides none."""

    encode: Encode
    decode: Decode
    eos_token_ids: frozenset[int]
    added_token_ids: frozenset[int]
    """Tokens that are cut out of a text before anything else, so that text may end before them."""

    def tokens(self, text: str, *, turns: Sequence[Sequence[int]], headers: Sequence[str]) -> list[int]:
        """Return the tokens of `text`, in which the drawn `turns` follow one of `headers`, in order.

        `headers` are ways in which the template begins a turn, the likeliest first. Whatever is
        returned decodes to the same text as the plain encoding does.
        """
        plain = self.encode(text)
        if not turns:
            return plain
        spliced = self._spliced(text, turns=turns, headers=[header for header in headers if header])
        return spliced if self.decode(spliced) == self.decode(plain) else plain

    def _spliced(self, text: str, *, turns: Sequence[Sequence[int]], headers: Sequence[str]) -> list[int]:
        tokens: list[int] = []
        position = 0
        for turn in turns:
            place = self._place(text, position, self._without_end(turn), headers)
            if place is not None:
                tokens += self.encode(text[position : place.start])
                tokens += place.token_ids
                position = place.stop
        return tokens + self.encode(text[position:])

    def _place(self, text: str, position: int, drawn: Sequence[int], headers: Sequence[str]) -> _Place | None:
        """Return where the turn stands whole; failing that, how it begins after the next header."""
        for header in headers:
            spelled = _Spelling(self, header).text(drawn)
            found = text.find(header + spelled, position) if spelled else -1
            stop = found + len(header) + len(spelled)
            if found >= 0 and self._may_end(text, stop):
                return _Place(found + len(header), stop, drawn)
        for header in headers:
            found = text.find(header, position)
            if found >= 0 and (part := self._beginning(text, found + len(header), drawn, header)) is not None:
                return part
        return None

    def _beginning(self, text: str, start: int, drawn: Sequence[int], header: str) -> _Place | None:
        """Return the longest beginning of a turn that the template has kept: it may trim or close it."""
        spelling = _Spelling(self, header)
        low, high = 0, len(drawn)
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(spelling.text(drawn[:middle]), start):
                low = middle
            else:
                high = middle - 1
        stop = start + len(spelling.text(drawn[:low]))
        return _Place(start, stop, drawn[:low]) if stop > start and self._may_end(text, stop) else None

    def _may_end(self, text: str, stop: int) -> bool:
        """Whether a token ends there in any case: elsewhere a word of an edited turn could be cut in two."""
        following = self.encode(text[stop : stop + _LONGEST_ADDED_TOKEN])
        return not following or following[0] in self.added_token_ids

    def _without_end(self, turn: Sequence[int]) -> list[int]:
        """Return the turn without the tokens that ended it: the template writes its own end."""
        drawn = list(turn)
        while drawn and drawn[-1] in self.eos_token_ids:
            drawn.pop()
        return drawn


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Tokens for `text[start:stop]`."""

    start: int
    stop: int
    token_ids: Sequence[int]


class _Spelling:
    """Text of tokens that stand behind a header, so that a leading space survives."""

    def __init__(self, turns: TurnTokens, header: str) -> None:
        self._decode = turns.decode
        self._before = turns.encode(header)[-_HEADER_TOKEN_COUNT:]
        self._known = turns.decode(self._before)

    def text(self, token_ids: Sequence[int]) -> str:
        whole = self._decode([*self._before, *token_ids])
        return whole[len(self._known) :] if whole.startswith(self._known) else ""
