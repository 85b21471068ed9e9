"""Detokenizer: turns tokens into text that may be sent: whole characters, without stop strings.

Runs on the inference thread while the device computes the next step, so that a stop string takes effect in
the step that completed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from icehouse_server.domain.chat import ReasoningMeter
from icehouse_server.text.values.text_source import certain_length

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
_PENDING_TOKEN_LIMIT = 8
"""A character has at most four bytes, so this many undecodable tokens are garbage, not a prefix."""
_CUT_TOKEN_LIMIT = 64
"""Most tokens in the window if each of them ends inside a character."""
_UNFINISHED_LIMIT = 3
"""Most bytes, and so most tokens, of a character that is not whole yet."""
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
        self._window, self._read_index = _context(decode, context_token_ids)
        self._known_text = decode(self._window[: self._read_index])
        # How the prompt's unfinished last character decodes alone: not output, unless output changes it.
        self._echo = self._new_text(self._window) if self._read_index < len(self._window) else ""
        self._undecided_count = len(self._window) - self._read_index
        """Tokens since text last became certain."""
        self._returned_byte_count = 0
        self._pending_byte_count = 0
        """Bytes of whole characters that are not certain yet: a space before an unfinished character."""

    @property
    def next_offset(self) -> int:
        """Where the text of the next token begins, in bytes of UTF-8: after the whole characters so far."""
        return self._returned_byte_count + self._pending_byte_count

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became certain, often one token's, sometimes empty."""
        self._window.append(token_id)
        self._undecided_count += 1
        text = self._new_text(self._window)
        if text and not text.endswith(_REPLACEMENT):
            return self._commit(text)
        self._pending_byte_count = len(text.rstrip(_REPLACEMENT).removeprefix(self._echo).encode())
        is_garbage = self._undecided_count > _PENDING_TOKEN_LIMIT
        if not text and (self._known_text or is_garbage):
            # A special token: it has no text and gives no context. Left in the window, a long run of them
            # would cost quadratic time. At the start it may be a space that the decoder strips, so it stays.
            self._window.pop()
            self._undecided_count -= 1
        elif is_garbage:
            return self._flush_garbage(text)
        return ""

    def flush(self) -> str:
        """Return what is left at the end, incomplete characters as U+FFFD."""
        return self._commit(self._new_text(self._window)) if len(self._window) > self._read_index else ""

    def _new_text(self, window: list[int]) -> str:
        text = self._decode(window)
        if text.startswith(self._known_text):
            return text[len(self._known_text) :]
        return self._decode(window[self._read_index :])

    def _flush_garbage(self, text: str) -> str:
        """Emit the pending garbage except its last tokens, which may be the start of a character."""
        for tail_count in range(_UNFINISHED_LIMIT, 2 * _UNFINISHED_LIMIT + 1):
            head, tail = self._window[:-tail_count], self._window[-tail_count:]
            head_text = self._new_text(head)
            # A cut inside a character would show as one more U+FFFD.
            if head_text and head_text + self._decode(tail) == text:
                self._window = head
                sent = self._commit(head_text)
                self._window += tail
                self._undecided_count = tail_count
                return sent
        certain = text.rstrip(_REPLACEMENT)
        if certain and len(self._window) - self._read_index <= _CUT_TOKEN_LIMIT:
            return self._flush_inside(certain) or self._commit(text)
        return self._commit(text)

    def _flush_inside(self, certain: str) -> str:
        """Emit the whole characters but keep all tokens, because each of them ends inside a character."""
        if not self._decode(self._window).startswith(self._known_text + certain):
            return ""
        self._known_text += certain
        return self._returned(certain)

    def _commit(self, text: str) -> str:
        self._window = self._window[self._read_index :]
        self._read_index = len(self._window)
        self._known_text = self._decode(self._window)
        return self._returned(text)

    def _returned(self, text: str) -> str:
        """Count text that is certain; return it without what the prompt showed of its first character."""
        sent, self._echo = text.removeprefix(self._echo), ""
        self._returned_byte_count += len(sent.encode())
        self._pending_byte_count = self._undecided_count = 0
        return sent


def _context(decode: Decode, token_ids: Sequence[int]) -> tuple[list[int], int]:
    """Return the prompt's last few tokens, and how many of them end with a whole character.

    A decoder with byte pieces takes a whole run of them for garbage if it begins or ends inside a character.
    So the context begins a little earlier if need be, and the output finishes an unfinished character.
    """
    start = max(0, len(token_ids) - _CONTEXT_TOKEN_COUNT)
    for unfinished_count in range(min(_UNFINISHED_LIMIT, len(token_ids)) + 1):
        stop = len(token_ids) - unfinished_count
        for begin in range(start, max(-1, start - _UNFINISHED_LIMIT - 1), -1):
            text = decode(token_ids[begin:stop])
            if not (text.startswith(_REPLACEMENT) or text.endswith(_REPLACEMENT)):
                return list(token_ids[begin:]), stop - begin
    return list(token_ids[start:]), len(token_ids) - start


@dataclasses.dataclass(frozen=True, slots=True)
class TextStep:
    """Text to send now, and the stop string that was completed, which is never sent itself."""

    text: str
    stop_string: str | None


class StopFilter:
    """Passes text on, holding back the longest tail that could still become a stop string.

    What is sent depends on the text alone, not on how it was cut into pieces. The first stop string to be
    complete ends the text; if several are complete at once, the longest does.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> TextStep:
        """Add text; return what is safe to send, and the stop string that ended the text, if any."""
        self._held += text
        matches = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            end, _, stop = min(matches)
            sent, self._held = self._held[: end - len(stop)], ""
            return TextStep(sent, stop)
        cut = certain_length(self._held, self._stops)
        sent, self._held = self._held[:cut], self._held[cut:]
        return TextStep(sent, None)

    def flush(self) -> str:
        """Return what was held back: the output ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Turns one sequence's tokens into text to send."""

    def __init__(
        self,
        *,
        decode: Decode,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        unsearched_token_count: int = 0,
        reasoning: ReasoningMeter | None = None,
    ) -> None:
        """Stop strings are not searched for in the first `unsearched_token_count` tokens. `reasoning` counts
        the tokens of reasoning, if the model reasons."""
        self._detokenizer = Detokenizer(decode, prompt_token_ids)
        self._stop_filter = StopFilter(stops)
        self._unsearched_token_count = unsearched_token_count
        self._reasoning = reasoning

    @property
    def reasoning_token_count(self) -> int:
        """Tokens of reasoning so far."""
        return 0 if self._reasoning is None else self._reasoning.token_count

    @property
    def next_offset(self) -> int:
        """Where the text of the next token begins in the output, in bytes of UTF-8. Stop strings count too,
        so after one this is past the end of what was sent."""
        return self._detokenizer.next_offset

    def push(self, token_id: int) -> TextStep:
        """Add one sampled token."""
        text = self._detokenizer.push(token_id)
        if self._reasoning is not None:
            self._reasoning.push(text)
        if self._unsearched_token_count:
            self._unsearched_token_count -= 1
            return TextStep(text, None)
        return self._stop_filter.push(text)

    def finish(self) -> TextStep:
        """End the output: everything held back is text after all, unless it completes a stop string."""
        last = self._stop_filter.push(self._detokenizer.flush())
        if last.stop_string is not None:
            return last
        return TextStep(last.text + self._stop_filter.flush(), None)
