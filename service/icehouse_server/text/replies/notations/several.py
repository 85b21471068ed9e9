"""Several notations of one family: a section is read in the first that it looks like."""

from __future__ import annotations

from icehouse_server.text.replies.core.calls import Calls
from icehouse_server.text.replies.core.reply_format import Notation
from icehouse_server.text.values.source import Reading, Source


class Several:
    """A choice of notations, the likeliest first; the last one says what is wrong with what none can read."""

    def __init__(self, *notations: Notation) -> None:
        self._notations = notations

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(start for notation in self._notations for start in notation.starts))

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(end for notation in self._notations for end in notation.ends))

    def begins(self, source: Source, calls: Calls) -> Reading[bool]:
        for notation in self._notations:
            if (yield from notation.begins(source, calls)):
                return True
        return False

    @property
    def wary_starts(self) -> tuple[str, ...]:
        return tuple(start for notation in self._notations for start in notation.wary_starts)

    def continues(self, source: Source, calls: Calls, marker: str) -> Reading[bool]:
        for notation in self._notations:
            if marker in notation.starts and (yield from notation.continues(source, calls, marker)):
                return True
        return False

    def read(self, source: Source, calls: Calls, marker: str) -> Reading[None]:
        """Read what follows `marker`."""
        fitting = [notation for notation in self._notations if not marker or marker in notation.starts]
        for notation in fitting[:-1]:
            is_it = notation.continues(source, calls, marker) if marker else notation.begins(source, calls)
            if (yield from is_it):
                yield from notation.read(source, calls, marker)
                return
        yield from fitting[-1].read(source, calls, marker)
