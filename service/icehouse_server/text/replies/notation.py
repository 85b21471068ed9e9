"""Notation: the syntax in which a model writes its calls, and how a section of them is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from icehouse_server.text.values.arguments import Argument
from icehouse_server.text.values.text_source import Reading, TextSource

SECTION_LENGTH_LIMIT = 1 << 18
"""Most characters of one section of calls, whose text is recorded until it ends."""


class ReplyCalls:
    """Receives what a notation reads, in the order of the text.

    This class ignores all of it, for readers that only need to know where calls end.
    """

    good_count = 0
    """Calls that were valid."""

    def __init__(self, source: TextSource) -> None:
        self._source = source

    def begin_section(self, marker: str) -> None:
        """Record the text from here on, after `marker`, which was already read."""
        self._source.record(marker, limit=SECTION_LENGTH_LIMIT)

    def end_section(self, *, problem: str = "") -> bool:
        """Stop recording; return whether all of the section could be read."""
        self._source.stop_recording()
        return not problem

    def offers(self, name: str) -> bool:
        """Whether a tool of this name may be called."""
        return True

    def has_argument(self, tool: str, argument: str) -> bool:
        """Whether the tool may have an argument of this name."""
        return False

    def begin_call(self) -> None:
        """Begin a call."""

    def name_tool(self, name: str, own_id: str = "") -> None:
        """Take the name of the call's tool; its arguments follow as JSON."""

    def add_arguments(self, text: str) -> None:
        """Take more text of the arguments, which are one JSON object."""

    def end_call(self, *, is_repaired: bool = False, problem: str = "") -> None:
        """End the call. `problem` says why it is not valid although it could be read."""

    def add_untyped(
        self, name: str, arguments: Sequence[Argument], *, is_python: bool = False, is_repaired: bool = False
    ) -> None:
        """Take a whole call of a notation that writes arguments without types."""


@dataclasses.dataclass(frozen=True, slots=True)
class Notation:
    """A notation and its markers."""

    starts: tuple[str, ...] = ()
    """Texts that begin a section; none if a reply begins with the calls themselves."""
    ends: tuple[str, ...] = ()
    """Texts that end a section; after a malformed section, reading continues after the next of them."""
    is_bare: bool = False
    """Whether a reply may begin with calls, without a start marker."""

    bare: ClassVar[Any] = None
    """The pattern of how such bare calls begin, with a group `name`."""

    @property
    def ambiguous_starts(self) -> tuple[str, ...]:
        """Starts that plain text may contain too: they count only if a call follows."""
        return ()

    def begins_bare(self, source: TextSource, calls: ReplyCalls) -> Reading[bool]:
        """Return whether a reply begins with bare calls; reads nothing."""
        match = (yield from source.ahead(self.bare)) if self.is_bare else None
        return match is not None and calls.offers(match["name"])

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        """Return whether a call seems to follow the start marker, not text about it; reads nothing."""
        raise NotImplementedError

    def read(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[None]:
        """Read the section after `marker`, including its end; raises Malformed."""
        if not (yield from self._read_calls(source, calls, marker)):
            calls.end_call(problem="there is no call in it")

    def _read_calls(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[int]:
        """As `read`; return how many calls there were."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class SeveralNotations(Notation):
    """Several notations, the likeliest first. The first one that a section looks like reads it. The last one
    reads everything else, and reports what is wrong with it."""

    notations: tuple[Notation, ...] = ()

    @property
    def ambiguous_starts(self) -> tuple[str, ...]:
        return tuple(start for notation in self.notations for start in notation.ambiguous_starts)

    def begins_bare(self, source: TextSource, calls: ReplyCalls) -> Reading[bool]:
        for notation in self.notations:
            if (yield from notation.begins_bare(source, calls)):
                return True
        return False

    def looks_like_call(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        for notation in self.notations:
            if marker in notation.starts and (yield from notation.looks_like_call(source, calls, marker)):
                return True
        return False

    def read(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[None]:
        fitting = [notation for notation in self.notations if not marker or marker in notation.starts]
        for notation in fitting[:-1]:
            is_it = (
                notation.looks_like_call(source, calls, marker)
                if marker
                else notation.begins_bare(source, calls)
            )
            if (yield from is_it):
                yield from notation.read(source, calls, marker)
                return
        yield from fitting[-1].read(source, calls, marker)


def several(*notations: Notation) -> SeveralNotations:
    """Return the choice between several notations."""
    starts = dict.fromkeys(start for notation in notations for start in notation.starts)
    ends = dict.fromkeys(end for notation in notations for end in notation.ends)
    return SeveralNotations(tuple(starts), tuple(ends), notations=notations)
