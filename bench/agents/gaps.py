"""Gaps between a session's requests: who pauses for longer than its tenant's sessions usually do."""

from __future__ import annotations

import collections
import math

from bench.agents.trace import Request

_REMEMBERED_GAP_COUNT = 256
"""Gaps of a tenant that count, the latest ones."""
_LEAST_GAP_COUNT = 20
"""With fewer of them nobody is idle for too long."""


class IdleSessions:
    """The sessions of each tenant, and the gaps between the requests of one session."""

    def __init__(self, share: float) -> None:
        """A pause that is longer than this share of the gaps is too long."""
        self._share = share
        self._last_s: collections.defaultdict[int, collections.OrderedDict[int, float]] = (
            collections.defaultdict(collections.OrderedDict)
        )
        """By tenant: when the sessions that are not idle for too long came last, the longest ago first."""
        self._known_s: dict[int, float] = {}
        """The same of all sessions."""
        self._gaps_s: collections.defaultdict[int, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=_REMEMBERED_GAP_COUNT)
        )

    def note(self, request: Request) -> list[int]:
        """Note a request; return who has become idle for too long by now, the longest first."""
        session, tenant, now_s = request.session, request.tenant, request.time_s
        if session in self._known_s:
            self._gaps_s[tenant].append(now_s - self._known_s[session])
        self._known_s[session] = self._last_s[tenant][session] = now_s
        self._last_s[tenant].move_to_end(session)
        return [idle for of in self._last_s for idle in self._take_idle(of, now_s)]

    def _take_idle(self, tenant: int, now_s: float) -> list[int]:
        waiting, usual_s, idle = self._last_s[tenant], self._usual_s(tenant), []
        while waiting and now_s - next(iter(waiting.values())) > usual_s:
            idle.append(waiting.popitem(last=False)[0])
        return idle

    def _usual_s(self, tenant: int) -> float:
        gaps_s = sorted(self._gaps_s[tenant])
        return math.inf if len(gaps_s) < _LEAST_GAP_COUNT else gaps_s[int(self._share * (len(gaps_s) - 1))]
