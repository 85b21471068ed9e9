"""From tokens to text that may be sent: whole characters only, stop strings held back.

Runs on the inference thread between steps, while the device computes the next one, so that
a stop string takes effect in the step that completed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
_PENDING_TOKEN_LIMIT = 8
"""A character has at most four bytes, so this many undecodable tokens are garbage, not a prefix."""
_CONTEXT_TOKEN_COUNT = 6
"""Prompt tokens decoded along with the first output token, so that its leading space survives."""


class Detokenizer:
    """Turns a growing list of tokens into text, never splitting a character.

    Decodes a short window twice, before and after the new tokens, and emits the difference:
    correct for every tokenizer whose text depends on neighbours (leading spaces, byte pieces),
    at a cost independent of the output's length.
    """

    def __init__(self, decode: Decode, context_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context_token_ids[-_CONTEXT_TOKEN_COUNT:])
        self._read_index = len(self._window)
        self._known_text = decode(self._window)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became certain, often one token's, sometimes empty."""
        self._window.append(token_id)
        text = self._new_text()
        pending_count = len(self._window) - self._read_index
        if text.endswith(_REPLACEMENT) and pending_count <= _PENDING_TOKEN_LIMIT:
            return ""
        if not text:
            return ""
        return self._commit(text)

    def flush(self) -> str:
        """Return what is left at the end, incomplete characters as U+FFFD."""
        return self._commit(self._new_text()) if len(self._window) > self._read_index else ""

    def _new_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._known_text):
            return text[len(self._known_text) :]
        return self._decode(self._window[self._read_index :])

    def _commit(self, text: str) -> str:
        self._window = self._window[self._read_index :]
        self._read_index = len(self._window)
        self._known_text = self._decode(self._window)
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class TextStep:
    """Text to send now, and the stop string that was met (its own text is never sent)."""

    text: str
    stop_string: str | None


class StopFilter:
    """Passes text on, holding back the longest tail that could still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> TextStep:
        """Add text; return what is safe to send, and the earliest stop string when one is complete."""
        self._held += text
        found = [(index, -len(stop), stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            index, _, stop = min(found)
            sent, self._held = self._held[:index], ""
            return TextStep(sent, stop)
        keep = self._longest_stop_prefix()
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return TextStep(sent, None)

    def flush(self) -> str:
        """Return what was held back: the output ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_stop_prefix(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class TextStream:
    """One sequence's way from token to sendable text."""

    def __init__(self, *, decode: Decode, prompt_token_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode, prompt_token_ids)
        self._stop_filter = StopFilter(stops)

    def push(self, token_id: int) -> TextStep:
        """Add one sampled token."""
        return self._stop_filter.push(self._detokenizer.push(token_id))

    def finish(self) -> TextStep:
        """End the output: everything held back is text after all, unless it completes a stop string."""
        last = self._stop_filter.push(self._detokenizer.flush())
        if last.stop_string is not None:
            return last
        return TextStep(last.text + self._stop_filter.flush(), None)
