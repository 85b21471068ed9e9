"""Notation: how a model's calls are written, and how a section of them is read to its end."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from icehouse_server.text.replies.reply_calls import ReplyCalls
from icehouse_server.text.values.text_source import Reading, TextSource


@dataclasses.dataclass(frozen=True, slots=True)
class Notation:
    """A notation, by its markers."""

    starts: tuple[str, ...] = ()
    """Texts that begin a section; empty where a reply begins with the calls themselves."""
    ends: tuple[str, ...] = ()
    """Texts that end a section, for going on behind one that cannot be read."""
    is_bare: bool = False
    """A reply may begin with calls and no start."""

    bare: ClassVar[Any] = None
    """What such calls begin with, with a group `name`."""

    @property
    def wary_starts(self) -> tuple[str, ...]:
        """Starts that text may hold as well: they count where a call follows."""
        return ()

    def begins(self, source: TextSource, calls: ReplyCalls) -> Reading[bool]:
        """Tell whether the text ahead, with which a reply begins, is calls without a start; reads nothing."""
        match = (yield from source.ahead(self.bare)) if self.is_bare else None
        return match is not None and calls.offers(match["name"])

    def continues(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        """Tell whether what follows a start looks like a call, and not like text about the start."""
        raise NotImplementedError

    def read(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[None]:
        """Read what follows `marker`, the end included; raises Malformed."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Several(Notation):
    """A choice of notations, the likeliest first: a section is read in the first that it looks like. The last
    one says what is wrong with what none can read."""

    notations: tuple[Notation, ...] = ()

    @property
    def wary_starts(self) -> tuple[str, ...]:
        return tuple(start for notation in self.notations for start in notation.wary_starts)

    def begins(self, source: TextSource, calls: ReplyCalls) -> Reading[bool]:
        for notation in self.notations:
            if (yield from notation.begins(source, calls)):
                return True
        return False

    def continues(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[bool]:
        for notation in self.notations:
            if marker in notation.starts and (yield from notation.continues(source, calls, marker)):
                return True
        return False

    def read(self, source: TextSource, calls: ReplyCalls, marker: str) -> Reading[None]:
        fitting = [notation for notation in self.notations if not marker or marker in notation.starts]
        for notation in fitting[:-1]:
            is_it = notation.continues(source, calls, marker) if marker else notation.begins(source, calls)
            if (yield from is_it):
                yield from notation.read(source, calls, marker)
                return
        yield from fitting[-1].read(source, calls, marker)


def several(*notations: Notation) -> Several:
    """Return the choice of these."""
    starts = dict.fromkeys(start for notation in notations for start in notation.starts)
    ends = dict.fromkeys(end for notation in notations for end in notation.ends)
    return Several(tuple(starts), tuple(ends), notations=notations)
