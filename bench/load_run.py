"""A plan of arrivals played against a server, and its results."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence

from bench.load_arrivals import Arrival
from bench.load_gaps import gaps_of, slow_gap_kinds
from bench.load_targets import Target
from bench.replies import Reply, quantile

PATIENCE_S = 30.0
"""A reply that has not ended this long after the last arrival counts as failed."""

STOP_TTFT_S = 3.0
"""p95 TTFT at which the load is not raised further."""


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """Limits that a good reply keeps, in seconds: of its TTFT, and of its mean inter-token time."""

    ttft_s: float = 1.0
    itl_s: float = 0.1

    def is_met(self, reply: Reply) -> bool:
        """Whether a reply keeps both limits."""
        times = reply.token_times_s
        itl_s = (times[-1] - times[0]) / max(1, len(times) - 1)
        return reply.ttft_s <= self.ttft_s and itl_s <= self.itl_s


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p95 and p99 of one latency, in seconds; NaN of nothing."""

    p50_s: float
    p95_s: float
    p99_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPoint:
    """One server at one offered load. Rates are per second of the time until the last reply ended."""

    target: str
    offered_per_s: float
    arrival_count: int
    failed_count: int
    finished_per_s: float
    tokens_per_s: float
    goodput_per_s: float
    ttft: Percentiles
    itl: Percentiles
    slow_gap_kinds: Mapping[str, float]

    @property
    def is_saturated(self) -> bool:
        """p95 TTFT passed what an open-loop bench goes up to, or so many failed that nobody can say."""
        return not self.ttft.p95_s <= STOP_TTFT_S or self.failed_count > 0.05 * self.arrival_count


async def play(target: Target, arrivals: Sequence[Arrival]) -> tuple[list[Reply | None], float]:
    """Send each request at its time, whatever is still running; return replies and the seconds taken."""
    began = time.perf_counter()

    async def ask_in_time(arrival: Arrival) -> Reply | None:
        await asyncio.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
        return await target.ask(arrival.text, max_output_tokens=arrival.max_output_tokens)

    tasks = [asyncio.create_task(ask_in_time(arrival)) for arrival in arrivals]
    _, late = await asyncio.wait(tasks, timeout=arrivals[-1].at_s + PATIENCE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [None if task in late else task.result() for task in tasks], time.perf_counter() - began


def summarize(
    target: Target,
    replies: Sequence[Reply | None],
    *,
    offered_per_s: float,
    elapsed_s: float,
    objective: Objective,
) -> LoadPoint:
    """Summarize one run."""
    whole = [reply for reply in replies if reply is not None]
    return LoadPoint(
        target=target.name,
        offered_per_s=offered_per_s,
        arrival_count=len(replies),
        failed_count=len(replies) - len(whole),
        finished_per_s=len(whole) / elapsed_s,
        tokens_per_s=sum(len(reply.token_times_s) for reply in whole) / elapsed_s,
        goodput_per_s=sum(objective.is_met(reply) for reply in whole) / elapsed_s,
        ttft=percentiles([reply.ttft_s for reply in whole]),
        itl=percentiles([gap.duration_s for reply in whole for gap in gaps_of(reply)]),
        slow_gap_kinds=slow_gap_kinds(whole),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return p50, p95 and p99 of the values."""
    return Percentiles(quantile(values, 0.5), quantile(values, 0.95), quantile(values, 0.99))


def goodput_ratio_at_stop(ours: Sequence[LoadPoint], theirs: Sequence[LoadPoint]) -> float | None:
    """Return goodput ours / theirs at the load where their p95 TTFT reaches `STOP_TTFT_S`.

    Between the loads on both sides of it by straight lines; None when no load was high enough, or the
    first one was too high already.
    """
    over = next((i for i, point in enumerate(theirs) if point.is_saturated), 0)
    if not over:
        return None
    low_s, high_s = (theirs[i].ttft.p95_s for i in (over - 1, over))
    share = (STOP_TTFT_S - low_s) / (high_s - low_s) if high_s > STOP_TTFT_S else 0.0
    mine, other = (
        side[over - 1].goodput_per_s * (1 - share) + side[over].goodput_per_s * share
        for side in (ours, theirs)
    )
    return mine / other if other else None
