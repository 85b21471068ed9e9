"""Waiting queue: bounded in requests and tokens, ordered by priority and age (inference thread).

A request's rank is its priority plus one for every `aging_s` it has waited, so that urgent work
goes first and nothing starves. Requests of a tenant that has its share running are passed over.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from icehouse_server.domain.ids import Tenant
from icehouse_server.engine.core.sequence import Sequence


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
        self._token_count = 0
        self._running: Counter[Tenant] = Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def token_count(self) -> int:
        """Tokens of all that wait."""
        return self._token_count

    def has_capacity_for(self, token_count: int, *, request_count: int = 1) -> bool:
        """Whether so many more requests of this many tokens each may wait. Tokens do not matter to an empty
        room."""
        if len(self._sequences) + request_count > self.limits.request_limit:
            return False
        limit = self.limits.token_limit
        return not limit or not self._sequences or self._token_count + request_count * token_count <= limit

    def add(self, sequence: Sequence) -> None:
        """Let a sequence in; also one that was parked, which no bound applies to."""
        self._sequences[sequence.sequence_id] = sequence
        self._token_count += len(sequence.input_token_ids)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, if it waits."""
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            self._token_count -= len(sequence.input_token_ids)

    def ranked(self, now: float) -> Iterator[Sequence]:
        """Yield who may run, the first in rank first, taking nobody out; a tenant's share is looked at as
        each one comes up."""
        limit = self.limits.tenant_running_limit
        for sequence in sorted(self._sequences.values(), key=lambda s: (-self._rank(s, now), s.sequence_id)):
            if not limit or self._running[sequence.request.tenant] < limit:
                yield sequence

    def tokens_ahead_of(self, priority: int) -> tuple[int, int]:
        """Return how many requests and tokens a newcomer of this priority would have before it."""
        ahead = [s for s in self._sequences.values() if s.request.priority >= priority]
        return len(ahead), sum(len(s.input_token_ids) for s in ahead)

    def note_running(self, sequence: Sequence) -> None:
        """Count a sequence against its tenant's share."""
        self._running[sequence.request.tenant] += 1

    def note_ended(self, sequence: Sequence) -> None:
        """Give a tenant's share back."""
        tenant = sequence.request.tenant
        self._running[tenant] -= 1
        assert self._running[tenant] >= 0, tenant
        if not self._running[tenant]:
            # Callers may make names up; only those that run something are kept.
            del self._running[tenant]

    def _rank(self, sequence: Sequence, now: float) -> float:
        waited_s = max(0.0, now - sequence.request.arrival_time)
        return sequence.request.priority + int(waited_s / self.limits.aging_s)
