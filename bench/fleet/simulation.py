"""Simulation of many workers behind a gateway: events in order of time, no server, one run for each seed.

The gateway's rule for cache-aware routing is SMG's (1.13, by events): the worker that has the most of the
prompt, were it one block, unless that worker is too busy; else the least busy one. What it knows of blocks is
up to date, as events make it within 50 ms.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import math
import random
from collections.abc import Sequence

from bench.fleet.sessions import Session, Shape, tokens_of
from bench.fleet.simulated_worker import Costs, PrefixKey, Reuse, SimulatedWorker, agent_key
from bench.replies import quantile

SPILL_COUNT = 64
_SPILL_FACTOR = 1.5
"""A preferred worker is too busy when it runs so many more requests than the mean, and so many times the
mean (`--balance-abs-threshold`, `--balance-rel-threshold`)."""
_LEAST_SPILL_COUNT = 4.0
"""The first of them is lowered to what chance alone makes of the mean, and to no less than this."""


class Routing(enum.Enum):
    """How the gateway chooses."""

    CACHE_AWARE = "cache-aware"
    ROUND_ROBIN = "round robin"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to. Times in seconds, shares from 0 to 1."""

    worker_count: int
    routing: Routing
    session_count: int
    request_count: int
    hit_rate: float
    """Prompt tokens reused, of all prompt tokens."""
    ssd_share: float
    """Of the reused tokens, those that came from SSD."""
    ttft_p50_s: float
    ttft_p95_s: float
    written_bytes: int
    busy_mean: float
    busy_max: float
    """Of all workers; from the first arrival to the last token."""


def start_times(
    sessions: Sequence[Session], shape: Shape, costs: Costs, *, worker_count: int, load: float, seed: int
) -> list[float]:
    """Return Poisson arrivals that keep the workers busy for this share of their time if all that was ever
    computed is reused."""
    tokens = tokens_of(sessions, shape)
    work_s = tokens.new_count / costs.prefill_tokens_per_s + tokens.output_count / costs.decode_tokens_per_s
    rate_per_s = load * worker_count * len(sessions) / work_s
    source = random.Random(seed)
    times, time_s = [], 0.0
    for _ in sessions:
        time_s += source.expovariate(rate_per_s)
        times.append(time_s)
    return times


def simulate(
    sessions: Sequence[Session],
    starts_s: Sequence[float],
    shape: Shape,
    costs: Costs,
    *,
    worker_count: int,
    routing: Routing,
    spill_count: int = SPILL_COUNT,
) -> Outcome:
    """Play all sessions to their end."""
    workers = [SimulatedWorker(costs) for _ in range(worker_count)]
    run = _Run(sessions, shape, costs, workers, routing=routing, spill_count=spill_count)
    run.play(starts_s)
    return run.outcome()


class _Run:
    """One simulated fleet. Only requests that arrive and requests that end are events."""

    def __init__(
        self,
        sessions: Sequence[Session],
        shape: Shape,
        costs: Costs,
        workers: Sequence[SimulatedWorker],
        *,
        routing: Routing,
        spill_count: int,
    ) -> None:
        self._sessions = sessions
        self._shape = shape
        self._costs = costs
        self._routing = routing
        self._spill_count = spill_count
        self._workers = workers
        self._holders: dict[PrefixKey, set[int]] = {}
        self._running_count = 0
        self._lengths = [0] * len(sessions)
        """Tokens that each session has of its own."""
        self._turns = [0] * len(sessions)
        self._next_worker = 0
        self._ttfts_s: list[float] = []
        self._prompt_count = self._ram_count = self._ssd_count = 0
        self._end_time_s = 0.0

    def play(self, starts_s: Sequence[float]) -> None:
        """Take events in their order, ends before arrivals of the same moment."""
        arrivals = [(time_s, 1, index, index) for index, time_s in enumerate(starts_s)]
        events: list[tuple[float, int, int, int]] = arrivals
        heapq.heapify(events)
        order = len(events)
        while events:
            now_s, is_arrival, _, number = heapq.heappop(events)
            if not is_arrival:
                self._workers[number].running_count -= 1
                self._running_count -= 1
                continue
            worker, end_time_s = self._request(number, now_s)
            self._end_time_s = max(self._end_time_s, end_time_s)
            heapq.heappush(events, (end_time_s, 0, order, worker))
            turns = self._sessions[number].turns
            if self._turns[number] < len(turns):
                pause_s = turns[self._turns[number]].pause_s
                heapq.heappush(events, (end_time_s + pause_s, 1, order + 1, number))
            order += 2

    def _request(self, number: int, now_s: float) -> tuple[int, float]:
        """Serve a session's next turn; return its worker and when it ends."""
        session = self._sessions[number]
        turn = session.turns[self._turns[number]]
        agent, own = agent_key(session.agent), PrefixKey(number)
        self._lengths[number] += turn.input_token_count
        prompt_count = self._shape.agent_token_count + self._lengths[number]
        index, reuse = self._route(agent, own)
        worker = self._workers[index]
        first_time_s, end_time_s = worker.serve(
            reuse, now_s=now_s, prompt_token_count=prompt_count, output_token_count=turn.output_token_count
        )
        worker.running_count += 1
        self._running_count += 1
        self._lengths[number] += turn.output_token_count
        self._turns[number] += 1
        self._keep(index, agent, self._shape.agent_token_count)
        self._keep(index, own, self._lengths[number])
        self._ttfts_s.append(first_time_s - now_s + self._costs.gateway_s)
        self._prompt_count += prompt_count
        self._ram_count += reuse.ram_count
        self._ssd_count += reuse.ssd_count
        return index, end_time_s

    def _keep(self, index: int, key: PrefixKey, token_count: int) -> None:
        self._holders.setdefault(key, set()).add(index)
        for lost in self._workers[index].keep(key, token_count):
            self._holders[lost].discard(index)

    def _route(self, agent: PrefixKey, own: PrefixKey) -> tuple[int, Reuse]:
        if self._routing is Routing.ROUND_ROBIN:
            index = self._next_worker
            self._next_worker = (index + 1) % len(self._workers)
        else:
            index = self._preferred(agent, own)
        return index, self._workers[index].known(agent, own)

    def _preferred(self, agent: PrefixKey, own: PrefixKey) -> int:
        best, best_rank = -1, (0, 0.0)
        for index in sorted(self._holders.get(own) or self._holders.get(agent) or ()):
            worker = self._workers[index]
            rank = (worker.known(agent, own).count, -worker.running_count)
            if rank > best_rank:
                best, best_rank = index, rank
        if best >= 0 and not self._is_too_busy(best):
            return best
        return self._least_busy()

    def _is_too_busy(self, index: int) -> bool:
        mean = self._running_count / len(self._workers)
        margin = min(self._spill_count, max(_LEAST_SPILL_COUNT, 2 * math.sqrt(mean)))
        count = self._workers[index].running_count
        return count > mean + margin and count > _SPILL_FACTOR * mean

    def _least_busy(self) -> int:
        counts = [(worker.running_count, worker.request_count) for worker in self._workers]
        return counts.index(min(counts))

    def outcome(self) -> Outcome:
        """Sum it up, everything written as at a stop."""
        for worker in self._workers:
            worker.flush()
        reused = self._ram_count + self._ssd_count
        busy = [worker.busy_s / self._end_time_s for worker in self._workers]
        written = sum(worker.written_token_count for worker in self._workers)
        return Outcome(
            worker_count=len(self._workers),
            routing=self._routing,
            session_count=len(self._sessions),
            request_count=len(self._ttfts_s),
            hit_rate=reused / self._prompt_count,
            ssd_share=self._ssd_count / reused if reused else 0.0,
            ttft_p50_s=quantile(self._ttfts_s, 0.5),
            ttft_p95_s=quantile(self._ttfts_s, 0.95),
            written_bytes=written * self._costs.kv_bytes_per_token,
            busy_mean=sum(busy) / len(busy),
            busy_max=max(busy),
        )
