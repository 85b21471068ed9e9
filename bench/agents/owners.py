"""Owners: which segments one session alone has used; a session and its sub-agents count as one family."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from bench.agents.trace import Request

_NOBODY, _SHARED = -2, -1


class Owners:
    """The session, or family, of each segment, as long as no other one has used it."""

    def __init__(self, segment_count: int) -> None:
        self._owners = [_NOBODY] * segment_count
        self._segments: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        """By session, those that became its own, a parent before its children."""
        self._roots: dict[int, int] = {}
        """The session at the top of each sub-agent's family."""

    def use(self, path: Sequence[int], request: Request) -> None:
        """Note that a request uses these segments, the last one first."""
        session, owners = request.session, self._owners
        if request.parent is not None and session not in self._roots:
            self._roots[session] = self._roots.get(request.parent, request.parent)
        fresh: list[int] = []
        for segment in path:
            owner = owners[segment]
            if owner in (session, _SHARED):
                continue
            if owner == _NOBODY:
                owners[segment] = session
                fresh.append(segment)
            elif self._root(owner) != self._root(session):
                owners[segment] = _SHARED
            elif owner != self._root(session):
                owners[segment] = self._root(session)
                self._segments[self._root(session)].append(segment)
        self._segments[session] += reversed(fresh)

    def is_shared(self, segment: int) -> bool:
        """Whether several families have used a segment."""
        return self._owners[segment] == _SHARED

    def of(self, session: int) -> list[int]:
        """Return what the session alone has used, a parent before its children."""
        own = [segment for segment in self._segments[session] if self._owners[segment] == session]
        self._segments[session] = own
        return own

    def end(self, session: int) -> list[int]:
        """Return what an ended session alone has used, and forget it."""
        own = self.of(session)
        del self._segments[session]
        return own

    def _root(self, session: int) -> int:
        return self._roots.get(session, session)
