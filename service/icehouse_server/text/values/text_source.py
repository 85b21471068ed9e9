"""Text source: a text that comes in pieces, for readers that wait for the next piece where they need more.

A reader is a generator that yields when it needs more text. What it decides depends on the text alone and
never on how it was cut: no primitive here looks at what has come so far without asking for the rest first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""Yields where more text is needed; returns what was read."""

_PUT_BACK_LIMIT = 1 << 20
"""Characters that are read a second time, of one text."""

SPACE = " \t\r\n"
SPACES = re.compile(r"[ \t\r\n]*")


class TextSource:
    """A text of which a part was read. `push` adds to it; readers consume it through the generators."""

    def __init__(self, text: str = "", *, has_ended: bool = False) -> None:
        self.rest = text
        """The text that has come and was not read."""
        self.has_ended = has_ended
        self.is_cut = False
        """The output ended at a limit; the model would have gone on."""
        self.read_length = 0
        """Characters that were read."""
        self._record: list[str] | None = None
        self._recorded_length = 0
        self._record_limit = 0
        self._put_back_length = 0

    def push(self, text: str) -> None:
        """Add text."""
        self.rest += text

    def end(self, *, is_cut: bool = False) -> None:
        """Say that no more text comes; `is_cut` where the model would have gone on."""
        self.has_ended = True
        self.is_cut = is_cut

    def record(self, begun: str, *, limit: int) -> None:
        """Record what is read from here on, behind `begun`; reading beyond `limit` raises TooLong."""
        self._record = [begun]
        self._recorded_length = len(begun)
        self._record_limit = limit

    def recorded(self) -> str:
        """Return what was read since `record` or the last look, and begin anew."""
        assert self._record is not None, "nothing is recorded"
        text = "".join(self._record)
        self._record, self._recorded_length = [], 0
        return text

    def stop_recording(self) -> None:
        """Forget the record and stop."""
        self._record = None

    def take(self, length: int) -> str:
        """Read so many characters, which must have come; raises TooLong where they are too many to record."""
        if self._record is not None and length > self._room():
            raise TooLong(f"it is longer than {self._record_limit} characters")
        taken, self.rest = self.rest[:length], self.rest[length:]
        self.read_length += len(taken)
        if self._record is not None:
            self._record.append(taken)
            self._recorded_length += len(taken)
        return taken

    def _take_some(self, length: int) -> str:
        """As `take`, but only as much as can be recorded, so that the limit does not depend on the cuts."""
        if self._record is not None and 0 < self._room() < length:
            return self.take(self._room())
        return self.take(length)

    def _room(self) -> int:
        return self._record_limit - self._recorded_length

    def put_back(self, text: str) -> None:
        """Put text that was read last back before the rest."""
        self.rest = text + self.rest
        self.read_length -= len(text)
        if self._record is not None:
            kept = "".join(self._record)
            assert kept.endswith(text), "only what was read last can be given back"
            self._record = [kept[: len(kept) - len(text)]]
            self._recorded_length -= len(text)

    def reread(self, text: str) -> None:
        """As `put_back`, for text of any length; raises TooLong where that was done too often."""
        self._put_back_length += len(text)
        if self._put_back_length > _PUT_BACK_LIMIT:
            raise TooLong("it can be read in too many ways")
        self.put_back(text)

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while not self.rest and not self.has_ended:
            yield
        return self.rest[:1]

    def failure(self, why: str) -> Reading[Malformed]:
        """Return what to raise where reading cannot go on: the output ended, or `why`."""
        return Malformed(why if (yield from self.peek()) else "the output ended inside it")

    def space(self) -> Reading[str]:
        """Read white space; return it."""
        found: list[str] = []
        yield from self.run(SPACES, found.append)
        return "".join(found)

    def run(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Reading[None]:
        """Read all that `pattern` matches: any number of characters of some kind."""
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
        found: list[str] = []
        length = 0

        def emit(part: str) -> None:
            nonlocal length
            found.append(part)
            length += len(part)
            if length > limit:
                raise TooLong(f"a name or number in it is longer than {limit} characters")

        yield from self.run(pattern, emit)
        return "".join(found)

    def ahead(self, pattern: Any) -> Reading[Any]:
        """Return the match of what comes next with a pattern of `regex`, None for none. Reads nothing.

        The pattern bounds how often anything repeats in it: it is tried again with each piece of text.
        """
        while True:
            match = pattern.match(self.rest, partial=not self.has_ended)
            is_open = match is not None and (match.partial or match.end() == len(self.rest))
            if self.has_ended or not is_open:
                return match
            yield

    def sees(self, *texts: str) -> Reading[str]:
        """Return which of `texts` comes next, the longest where several do; "" for none. Reads nothing."""
        while not self.has_ended and any(
            len(self.rest) < len(text) and text.startswith(self.rest) for text in texts
        ):
            yield
        return max((text for text in texts if self.rest.startswith(text)), key=len, default="")

    def accepts(self, *texts: str) -> Reading[str]:
        """As `sees`, and read it."""
        found = yield from self.sees(*texts)
        self.take(len(found))
        return found

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Reading[str]:
        """Emit all text before the first marker; read and return the marker, "" at the end."""
        while True:
            place, marker = self._first(markers)
            held = len(self.rest) if self.has_ended else self._held(markers)
            is_found = bool(marker) and (self.has_ended or place < held)
            if is_found and not place:
                return self.take(len(marker))
            if is_found or (held and not marker):
                emit(self._take_some(place if is_found else held))
                continue
            if self.has_ended:
                return ""
            yield

    def _first(self, markers: Sequence[str]) -> tuple[int, str]:
        """Return where the first marker begins, and which it is, the longest where several begin there."""
        best, found = len(self.rest) + 1, ""
        for marker in markers:
            place = self.rest.find(marker)
            if place >= 0 and (place < best or (place == best and len(marker) > len(found))):
                best, found = place, marker
        return best, found

    def _held(self, markers: Sequence[str]) -> int:
        """Return where a marker may begin whose end has not come."""
        longest = max(map(len, markers), default=0)
        firsts = {marker[0] for marker in markers}
        for start in range(max(0, len(self.rest) - longest + 1), len(self.rest)):
            if self.rest[start] in firsts:
                tail = self.rest[start:]
                if any(len(marker) > len(tail) and marker.startswith(tail) for marker in markers):
                    return start
        return len(self.rest)


class Malformed(Exception):
    """A text that is no tool call; the message says why."""


class TooLong(Malformed):
    """A text longer than the limit."""


def read_whole(reading: Reading[Result]) -> Result:
    """Return the result of reading a source that has ended."""
    try:
        while True:
            next(reading)
            # A reader that waits for more at the end would wait for ever.
    except StopIteration as stop:
        result: Result = stop.value
        return result
