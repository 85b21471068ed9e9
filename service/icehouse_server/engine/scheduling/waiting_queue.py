"""Waiting queue: bounded in requests and tokens, tenants in turn, of each by priority and age (inference
thread).

Requests of the tenant that runs least come first, so that none can hold up the others by number or priority.
Among a tenant's own a request's rank is its priority plus one for every `aging_s` it has waited, so that
urgent work goes first and nothing starves. Requests of a tenant that has its share running are passed over.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Iterator

from icehouse_server.domain.ids import Tenant
from icehouse_server.engine.core.sequence import Sequence

_NOBODY = Tenant("")
"""The tenant of callers without a tenant."""


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingLimits:
    """Bounds; 0 means unlimited for tokens and tenants."""

    request_limit: int
    token_limit: int = 0
    tenant_running_limit: int = 0
    aging_s: float = 5.0


class WaitingQueue:
    """Sequences that were accepted and have no slot yet."""

    def __init__(self, limits: WaitingLimits) -> None:
        self.limits = limits
        self._sequences: dict[int, Sequence] = {}
        self.token_count = 0
        """Tokens of all that wait."""
        self._waiting: Counter[Tenant] = Counter()
        self._waiting_tokens: Counter[Tenant] = Counter()
        self._running: Counter[Tenant] = Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def has_capacity_for(self, token_count: int, *, tenant: Tenant = _NOBODY, request_count: int = 1) -> bool:
        """Whether so many more requests of this many tokens each may wait. Tokens do not matter to an empty
        queue; in a queue that others have filled, a tenant still has an equal part."""
        if self._fits(len(self._sequences), self.token_count, token_count, request_count, part=1):
            return True
        own_count, own_tokens = self._waiting[tenant], self._waiting_tokens[tenant]
        tenant_count = len(self._waiting) + (tenant not in self._waiting)
        return tenant_count > 1 and self._fits(
            own_count, own_tokens, token_count, request_count, part=tenant_count
        )

    def _fits(self, count: int, tokens: int, token_count: int, request_count: int, *, part: int) -> bool:
        """Whether requests fit beside so many into the queue divided by `part`."""
        if count + request_count > self.limits.request_limit // part:
            return False
        limit = self.limits.token_limit
        return not limit or not count or tokens + request_count * token_count <= limit // part

    def add(self, sequence: Sequence) -> None:
        """Let a sequence in; also one that was parked, which no bound applies to."""
        self._sequences[sequence.sequence_id] = sequence
        self._count(sequence, 1)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, if it waits."""
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        tenant, token_count = sequence.request.tenant, sign * len(sequence.input_token_ids)
        self.token_count += token_count
        self._waiting_tokens[tenant] += token_count
        self._waiting[tenant] += sign
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._waiting_tokens[tenant]

    def ranked(self, now: float) -> Iterator[Sequence]:
        """Yield who may run, taking nobody out: of the tenant that runs least, those yielded before counted
        in, the first in rank. A tenant's share is looked at as each one comes up."""
        limit = self.limits.tenant_running_limit
        queues: dict[Tenant, deque[tuple[float, int]]] = {}
        order = [(-self._rank(s, now), s.sequence_id) for s in self._sequences.values()]
        for entry in sorted(order):
            tenant = self._sequences[entry[1]].request.tenant
            queues.setdefault(tenant, deque()).append(entry)
        heads = [(self._running[tenant], *queue.popleft(), tenant) for tenant, queue in queues.items()]
        heapq.heapify(heads)
        while heads:
            running_count, _, sequence_id, tenant = heads[0]
            if limit and self._running[tenant] >= limit:
                heapq.heappop(heads)
                continue
            yield self._sequences[sequence_id]
            if queues[tenant]:
                heapq.heapreplace(heads, (running_count + 1, *queues[tenant].popleft(), tenant))
            else:
                heapq.heappop(heads)

    def running_count(self, tenant: Tenant) -> int:
        """Sequences of a tenant that have a slot."""
        return self._running[tenant]

    @property
    def greediest(self) -> Tenant | None:
        """The tenant that runs most; None while nothing runs."""
        return max(self._running, key=lambda tenant: self._running[tenant], default=None)

    def tokens_ahead_of(self, priority: int, *, tenant: Tenant = _NOBODY) -> tuple[int, int]:
        """Return how many requests and tokens a newcomer of this priority would have before it: its tenant's
        own, and of others as many as come before it in turn."""
        own = [
            len(s.input_token_ids)
            for s in self._sequences.values()
            if s.request.tenant == tenant and s.request.priority >= priority
        ]
        request_count, token_count = len(own), sum(own)
        turn = self._running[tenant] + len(own)
        for other, waiting_count in self._waiting.items():
            if other != tenant:
                ahead = min(waiting_count, max(0, turn + 1 - self._running[other]))
                request_count += ahead
                token_count += self._waiting_tokens[other] * ahead // waiting_count
        return request_count, token_count

    def note_running(self, sequence: Sequence) -> None:
        """Count a sequence against its tenant's share."""
        self._running[sequence.request.tenant] += 1

    def note_ended(self, sequence: Sequence) -> None:
        """Give a tenant's share back."""
        tenant = sequence.request.tenant
        self._running[tenant] -= 1
        assert self._running[tenant] >= 0, tenant
        if not self._running[tenant]:
            # Callers may make names up; only those that run something are counted.
            del self._running[tenant]

    def _rank(self, sequence: Sequence, now: float) -> float:
        waited_s = max(0.0, now - sequence.request.arrival_time)
        return sequence.request.priority + int(waited_s / self.limits.aging_s)
