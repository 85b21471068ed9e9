"""Borders of messages in a prompt: where another conversation, or an edit of this one, would diverge.

They are found by counting special tokens between turns in the conversation's skeleton. The end of the system
message is counted from the prompt's start and the last message from its end, since anything may come between.
If a message spells such a token itself, a border may be misplaced. That does no harm: a border is only a
place from which a later prompt may continue. Pure functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Sequence

from icehouse_server.domain.chat import ChatMessage
from icehouse_server.text.chat.probes import ShownTexts

_SYSTEM_ROLES = ("system", "developer")


@dataclasses.dataclass(frozen=True, slots=True)
class TurnBorders:
    """Borders, each named by the special token after it: its number among the prompt's marks, from 1."""

    from_start: tuple[int, ...] = ()
    from_end: tuple[int, ...] = ()
    marks: frozenset[str] = frozenset()
    """The special tokens that are counted."""

    def token_indices(self, token_ids: Sequence[int], mark_ids: Collection[int]) -> tuple[int, ...]:
        """Return the borders as token indices of a prompt, ascending."""
        last = len(token_ids) - 1
        places = {
            *_places(enumerate(token_ids), mark_ids, self.from_start),
            *(last - place for place in _places(enumerate(reversed(token_ids)), mark_ids, self.from_end)),
        }
        return tuple(sorted(place for place in places if 0 < place < last))


def borders_of(
    shown: ShownTexts,
    messages: Sequence[ChatMessage],
    *,
    has_tools: bool,
    header: str,
    marks: re.Pattern[str],
) -> TurnBorders:
    """Return the borders of a conversation: the end of the system message and tools, and the start of the
    last message. Its end is one too if `header` is not empty. `header` is what the template writes before the
    reply, if it will write something else there once the reply is known.
    """
    found = list(marks.finditer(shown.text))
    places = [match.start() for match in found]
    first = next((i for i, message in enumerate(messages) if message.role not in _SYSTEM_ROLES), None)
    from_start, from_end = [], []
    if first is not None and (first or has_tools):
        place = _last_before(places, shown, first)
        from_start += [] if place is None else [place + 1]
    place = _last_before(places, shown, len(messages) - 1)
    from_end += [] if place is None else [len(places) - place]
    if marks.match(header):
        from_end.append(sum(1 for _ in marks.finditer(header)))
    return TurnBorders(tuple(from_start), tuple(from_end), frozenset(match.group() for match in found))


def _last_before(places: Sequence[int], shown: ShownTexts, index: int) -> int | None:
    """Return which of the tokens at these places is the last one before a message's text; None if the texts
    of earlier messages come after it, so that the template shows messages in another order."""
    starts = [start for start, message in shown.words if message == index]
    earlier = [start for start, message in shown.words if message < index]
    before = [number for number, place in enumerate(places) if starts and place < starts[0]]
    if not before or (earlier and max(earlier) > places[before[-1]]):
        return None
    return before[-1]


def _places(tokens: Iterator[tuple[int, int]], mark_ids: Collection[int], wanted: Sequence[int]) -> set[int]:
    """Return the places of those marks whose numbers are wanted."""
    marked = (place for place, token_id in tokens if token_id in mark_ids)
    counted = enumerate(itertools.islice(marked, max(wanted, default=0)), start=1)
    return {place for number, place in counted if number in wanted}
