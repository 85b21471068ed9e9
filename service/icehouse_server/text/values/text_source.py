"""Text source: a text that arrives in parts, and the operations that readers read it with.

A reader is a generator that yields when it needs more text. Its result depends on the text alone, never on
how it was split: no operation decides anything from where the arrived text happens to end; it waits for more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Yields where more text is needed; returns what was read."""

_PUT_BACK_LIMIT = 1 << 20
"""Most characters of one text that may be read a second time."""

SPACE = " \t\r\n"
SPACES = re.compile(r"[ \t\r\n]*")


class TextSource:
    """A text that is being read. `push` adds to it; readers consume it through generators."""

    def __init__(self, text: str = "", *, has_ended: bool = False) -> None:
        self.rest = text
        """Text that has arrived but is not read yet."""
        self.has_ended = has_ended
        self.is_cut = False
        """Whether a limit ended the output, not the model."""
        self.read_length = 0
        """Characters that were read so far."""
        self._record: list[str] | None = None
        self._recorded_length = 0
        self._record_limit = 0
        self._put_back_length = 0

    def push(self, text: str) -> None:
        self.rest += text

    def end(self, *, is_cut: bool = False) -> None:
        """Mark the end of the text; `is_cut` if a limit ended the output, not the model."""
        self.has_ended = True
        self.is_cut = is_cut

    def record(self, begun: str, *, limit: int) -> None:
        """Record what is read from here on, after `begun`; more than `limit` characters raise TooLong."""
        self._record = [begun]
        self._recorded_length = len(begun)
        self._record_limit = limit

    def recorded(self) -> str:
        """Return what was read since `record` or the last call, and start an empty record."""
        assert self._record is not None, "nothing is recorded"
        text = "".join(self._record)
        self._record, self._recorded_length = [], 0
        return text

    def stop_recording(self) -> None:
        self._record = None

    def take(self, length: int) -> str:
        """Read this many characters, which must have arrived; raises TooLong beyond the record's limit."""
        if self._record is not None and length > self._free_length():
            raise TooLong(f"it is longer than {self._record_limit} characters")
        taken, self.rest = self.rest[:length], self.rest[length:]
        self.read_length += len(taken)
        if self._record is not None:
            self._record.append(taken)
            self._recorded_length += len(taken)
        return taken

    def _take_some(self, length: int) -> str:
        """As `take`, but no more than the record holds: its limit must not depend on how text arrives."""
        if self._record is not None and 0 < self._free_length() < length:
            return self.take(self._free_length())
        return self.take(length)

    def _free_length(self) -> int:
        return self._record_limit - self._recorded_length

    def put_back(self, text: str) -> None:
        """Put the text that was read last back into the source."""
        self.rest = text + self.rest
        self.read_length -= len(text)
        if self._record is not None:
            recorded = "".join(self._record)
            assert recorded.endswith(text), "only what was read last can be put back"
            self._record = [recorded[: len(recorded) - len(text)]]
            self._recorded_length -= len(text)

    def reread(self, text: str) -> None:
        """As `put_back`, for text of any length; raises TooLong if that happens too often."""
        self._put_back_length += len(text)
        if self._put_back_length > _PUT_BACK_LIMIT:
            raise TooLong("it can be read in too many ways")
        self.put_back(text)

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while not self.rest and not self.has_ended:
            yield
        return self.rest[:1]

    def next(self, missing: str) -> Reading[str]:
        """Read one character; raises Malformed with `missing` at the end."""
        if not (yield from self.peek()):
            raise Malformed(missing)
        return self.take(1)

    def failure(self, why: str) -> Reading[Malformed]:
        """Return the error for text that cannot be read: `why`, or that the output ended."""
        return Malformed(why if (yield from self.peek()) else "the output ended inside it")

    def space(self) -> Reading[str]:
        """Read white space; return it."""
        parts: list[str] = []
        yield from self.run(SPACES, parts.append)
        return "".join(parts)

    def run(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Reading[None]:
        """Read everything that `pattern` matches: any number of characters of one kind."""
        while True:
            match = pattern.match(self.rest)
            if match is not None and match.end():
                emit(self._take_some(match.end()))
                continue
            if self.rest or self.has_ended:
                return
            yield

    def word(self, pattern: re.Pattern[str], *, limit: int) -> Reading[str]:
        """As `run`, and return what was read; raises TooLong beyond `limit` characters."""
        parts: list[str] = []

        def emit(part: str) -> None:
            parts.append(part)
            if sum(map(len, parts)) > limit:
                raise TooLong(f"a name or number in it is longer than {limit} characters")

        yield from self.run(pattern, emit)
        return "".join(parts)

    def ahead(self, pattern: Any) -> Reading[Any]:
        """Match what comes next against a pattern of `regex`; return the match or None. Reads nothing.

        The pattern must bound its repetitions, since it is matched again with each part of the text.
        """
        while True:
            match = pattern.match(self.rest, partial=not self.has_ended)
            is_open = match is not None and (match.partial or match.end() == len(self.rest))
            if self.has_ended or not is_open:
                return match
            yield

    def sees(self, *texts: str) -> Reading[str]:
        """Return which of `texts` comes next, the longest if several match; "" for none. Reads nothing."""
        while not self.has_ended and any(
            len(self.rest) < len(text) and text.startswith(self.rest) for text in texts
        ):
            yield
        return max((text for text in texts if self.rest.startswith(text)), key=len, default="")

    def accepts(self, *texts: str) -> Reading[str]:
        """As `sees`, but also read the text."""
        text = yield from self.sees(*texts)
        self.take(len(text))
        return text

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Reading[str]:
        """Emit all text before the first marker; read and return the marker, "" at the end."""
        while True:
            index, marker = self._first(markers)
            certain = len(self.rest) if self.has_ended else certain_length(self.rest, markers)
            is_match = bool(marker) and (self.has_ended or index < certain)
            if is_match and not index:
                return self.take(len(marker))
            if is_match or (certain and not marker):
                emit(self._take_some(index if is_match else certain))
                continue
            if self.has_ended:
                return ""
            yield

    def _first(self, markers: Sequence[str]) -> tuple[int, str]:
        """Return the first marker's index and the marker: the longest of several there, "" for none."""
        matches = [(self.rest.find(marker), -len(marker), marker) for marker in markers]
        index, _, marker = min((match for match in matches if match[0] >= 0), default=(0, 0, ""))
        return index, marker


def certain_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of a text without a tail that may be the beginning of a marker."""
    longest = max(map(len, markers), default=0)
    firsts = {marker[0] for marker in markers}
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if text[start] in firsts:
            tail = text[start:]
            if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
                return start
    return len(text)


class Malformed(Exception):
    """A text that is not a tool call; the message says why."""


class TooLong(Malformed):
    """A text longer than the limit."""


def read_whole(reading: Reading[Result]) -> Result:
    """Return the result of reading a source that has ended."""
    try:
        while True:
            next(reading)
    except StopIteration as stop:
        result: Result = stop.value
        return result
