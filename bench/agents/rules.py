"""Rules: in which order segments leave a cache, and which blocks are worth writing.

Every order keeps the tree whole: no segment goes before those that follow it. Segments are numbers of
`Paths`.
"""

from __future__ import annotations

import collections
import enum
import heapq
import math
from collections.abc import Sequence
from typing import Protocol

from bench.agents.paths import NONE, Paths


class Rule(enum.Enum):
    """The rules that are compared."""

    LRU = "LRU, as today"
    ENDS_FIRST = "LRU, ended sessions first"
    ENDS_DROPPED = "LRU, ended sessions dropped"
    IDLE_SESSION = "idle session first"
    BEYOND_90 = "LRU, sessions idle beyond 90 % of gaps first"
    BEYOND_99 = "LRU, sessions idle beyond 99 % of gaps first"
    SECOND_HIT = "LRU, SSD at the second use"
    BELADY = "Belady (knows the future)"


IDLE_SHARES = {Rule.BEYOND_90: 0.9, Rule.BEYOND_99: 0.99}
"""The share of its tenant's gaps that a session's pause is longer than when it goes first."""


class Order(Protocol):
    """Order in which a cache's segments go."""

    def use(self, path: Sequence[int], own: Sequence[int], request: int) -> None:
        """Note a request: its segments, the last one first, and all that its session alone has used."""
        ...

    def put_first(self, segments: Sequence[int]) -> None:
        """Let these go next, the last one of them first."""
        ...

    def first(self) -> int:
        """Return the segment whose last block goes next."""
        ...

    def remove(self, segment: int) -> None:
        """Forget a segment of which nothing is left."""
        ...


class LruOrder:
    """Least recently used first, a chain's end before its beginning, as in the service's tiers."""

    def __init__(self) -> None:
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def use(self, path: Sequence[int], own: Sequence[int], request: int) -> None:
        """Make the path the most recently used one."""
        order = self._order
        for segment in path:
            order[segment] = None
            order.move_to_end(segment)

    def put_first(self, segments: Sequence[int]) -> None:
        """Make these the least recently used ones."""
        for segment in segments:
            if segment in self._order:
                self._order.move_to_end(segment, last=False)

    def first(self) -> int:
        """Return the least recently used segment."""
        return next(iter(self._order))

    def remove(self, segment: int) -> None:
        """Forget a segment."""
        del self._order[segment]


class SessionOrder(LruOrder):
    """The session that has been idle for longest first: with a request all of its session's segments count as
    used, also those that the prompt has left behind."""

    def use(self, path: Sequence[int], own: Sequence[int], request: int) -> None:
        """Make the session's segments the most recently used ones, and the path the last of them."""
        for segment in reversed(own):
            if segment in self._order:
                self._order.move_to_end(segment)
        super().use(path, own, request)


class IdleOrder(LruOrder):
    """Segments of sessions that have paused for too long go before all others, the longest idle first."""

    def __init__(self) -> None:
        super().__init__()
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    def use(self, path: Sequence[int], own: Sequence[int], request: int) -> None:
        """Make the path the most recently used one, whoever paused."""
        for segment in path:
            self._idle.pop(segment, None)
        super().use(path, own, request)

    def put_next(self, segments: Sequence[int]) -> None:
        """Let these go behind those that were put here before, the last one of them first."""
        for segment in reversed(segments):
            if segment in self._order:
                del self._order[segment]
                self._idle[segment] = None

    def first(self) -> int:
        """Return a segment of the session that has been idle for longest, or else the least recently used."""
        return next(iter(self._idle)) if self._idle else super().first()

    def remove(self, segment: int) -> None:
        """Forget a segment."""
        if self._idle.pop(segment, self) is self:
            super().remove(segment)


class BeladyOrder:
    """What is needed latest, or never again, first. No rule that has to be obeyed request by request can hit
    more often."""

    def __init__(self, paths: Paths) -> None:
        self._parents = paths.parents
        self._starts = paths.starts
        self._nexts = _next_uses(paths)
        self._next: list[float] = [math.inf] * len(paths.parents)
        self._held: set[int] = set()
        self._leaves: list[tuple[float, int, int]] = []
        """Heap of segments that nothing held follows: minus the next use, minus the depth, the number.
        Entries whose next use has changed are skipped."""

    def use(self, path: Sequence[int], own: Sequence[int], request: int) -> None:
        """Note when each segment is needed next."""
        place = 0
        for next_use, count in self._nexts[request]:
            for segment in path[place : place + count]:
                self._next[segment] = next_use
            place += count
        self._held.update(path)
        if path:
            self._push(path[0])

    def put_first(self, segments: Sequence[int]) -> None:
        """Nothing: it knows better."""

    def first(self) -> int:
        """Return the held segment that is needed latest."""
        while True:
            minus_next, _, segment = self._leaves[0]
            if segment in self._held and -minus_next == self._next[segment]:
                return segment
            heapq.heappop(self._leaves)

    def remove(self, segment: int) -> None:
        """Forget a segment; the one before it may go next."""
        self._held.discard(segment)
        above = self._parents[segment]
        if above != NONE and above in self._held:
            self._push(above)

    def _push(self, segment: int) -> None:
        heapq.heappush(self._leaves, (-self._next[segment], -self._starts[segment], segment))


def _next_uses(paths: Paths) -> list[tuple[tuple[float, int], ...]]:
    """Return by request when its segments are needed next, the last one first, as (request, how many)."""
    upcoming: list[float] = [math.inf] * len(paths.parents)
    found: list[tuple[tuple[float, int], ...]] = []
    for request in range(len(paths.ends) - 1, -1, -1):
        runs: list[tuple[float, int]] = []
        for segment in paths.upwards(paths.ends[request]):
            if runs and runs[-1][0] == upcoming[segment]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((upcoming[segment], 1))
            upcoming[segment] = request
        found.append(tuple(runs))
    return found[::-1]


def order_of(rule: Rule, paths: Paths) -> Order:
    """Return a rule's order, with nothing in it."""
    if rule is Rule.BELADY:
        return BeladyOrder(paths)
    if rule in IDLE_SHARES:
        return IdleOrder()
    return SessionOrder() if rule is Rule.IDLE_SESSION else LruOrder()
