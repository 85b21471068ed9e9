"""Waiting queue: bounded in requests and tokens, with tenants taking turns (inference thread).

Requests of the tenant that runs least come first, so that no tenant can hold up others by number or priority.
Within a tenant, a request's rank is its priority plus one for every `aging_s` that it has waited: urgent work
goes first and nothing starves. Tenants that run their full share are skipped.
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
    """Accepted sequences without a slot."""

    def __init__(self, limits: WaitingLimits) -> None:
        self.limits = limits
        self._sequences: dict[int, Sequence] = {}
        self.token_count = 0
        """Input tokens of all waiting sequences."""
        self._waiting: Counter[Tenant] = Counter()
        self._waiting_tokens: Counter[Tenant] = Counter()
        self._running: Counter[Tenant] = Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def has_capacity_for(self, token_count: int, *, tenant: Tenant = _NOBODY, request_count: int = 1) -> bool:
        """Whether so many more requests of this many tokens each may wait. An empty queue takes any number of
        tokens. If others have filled the queue, a tenant still has an equal part of it."""
        if self._fits(len(self._sequences), self.token_count, token_count, request_count, part=1):
            return True
        own_count, own_tokens = self._waiting[tenant], self._waiting_tokens[tenant]
        tenant_count = len(self._waiting) + (tenant not in self._waiting)
        return tenant_count > 1 and self._fits(
            own_count, own_tokens, token_count, request_count, part=tenant_count
        )

    def _fits(self, count: int, tokens: int, token_count: int, request_count: int, *, part: int) -> bool:
        """Whether more requests fit beside `count` others into the queue divided by `part`."""
        if count + request_count > self.limits.request_limit // part:
            return False
        limit = self.limits.token_limit
        return not limit or not count or tokens + request_count * token_count <= limit // part

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. Parked ones come back here too, without bounds."""
        self._sequences[sequence.sequence_id] = sequence
        self._count(sequence, 1)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is waiting."""
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
        """Yield sequences in the order in which they may run, and keep them in the queue: always the first in
        rank of the tenant that runs least, counting those already yielded. Shares are checked at each
        turn."""
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
        """How many sequences of a tenant have a slot."""
        return self._running[tenant]

    @property
    def greediest(self) -> Tenant | None:
        """The tenant that runs most; None while nothing runs."""
        return max(self._running, key=lambda tenant: self._running[tenant], default=None)

    def tokens_ahead_of(self, priority: int, *, tenant: Tenant = _NOBODY) -> tuple[int, int]:
        """Return how many requests and tokens would be ahead of a newcomer of this priority: its own
        tenant's, and of other tenants those whose turn is earlier."""
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
        """Count a running sequence against its tenant's share."""
        self._running[sequence.request.tenant] += 1

    def note_ended(self, sequence: Sequence) -> None:
        """Stop counting a sequence against its tenant's share."""
        tenant = sequence.request.tenant
        self._running[tenant] -= 1
        assert self._running[tenant] >= 0, tenant
        if not self._running[tenant]:
            # Callers may invent tenant names, so only those that run something are kept.
            del self._running[tenant]

    def _rank(self, sequence: Sequence, now: float) -> float:
        waited_s = max(0.0, now - sequence.request.arrival_time)
        return sequence.request.priority + int(waited_s / self.limits.aging_s)
