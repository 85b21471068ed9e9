"""Target: what a figure's median must be and should be, and what this run says of it.

The table is that of the one pass: ratios to BatchGenerator in process within the same run, except where
the figure's name says what else it is compared with.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from bench.cases.figure import (
    BASELINE_RATIO,
    CROWD_RATIO,
    GAP_RATIO,
    MEMORY_RATIO,
    PREFILL_TIME_RATIO,
    RESTART_RATIO,
    TOKENS_PER_S_RATIO,
    TTFT_TAIL_RATIO,
    WORST_TTFT_RATIO,
    Figure,
    FigureKey,
    spreads,
)
from bench.report import Spread, show_table

LONE, FEW, MANY, CROWD = "1 client", "4 clients", "16 clients", "64 clients"
LONG_AMONG_SHORT = "15 x 40 + 1 x 2,000"
MIDDLE = "8 x 500"
BESIDE = "8 rows beside a prefill of 1,000"
SHARED_PROMPT = "8 on a system prompt of 1,500"
RESTART_HITS = "8 x 800"
CLOSED_LOOP = "16 clients in a closed loop"
MEMORY = "memory of 8 x 500"
KV_BITS = "16 rows with 8-bit KV"


class Bound(enum.Enum):
    """On which side of a target a median is good."""

    AT_LEAST = ">="
    AT_MOST = "<="


class Grade(enum.Enum):
    """What a run says of a target."""

    GOAL_MET = "met, goal met"
    MUST_MET = "met, goal missed"
    MISSED = "MISSED"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Bounds on the median of one figure, on whatever side it was measured."""

    case: str
    name: str
    must: float
    goal: float
    bound: Bound

    def matches(self, key: FigureKey) -> bool:
        """Whether a figure of this key is meant."""
        return (key.case, key.name) == (self.case, self.name)

    def grade(self, median: float) -> Grade:
        """Return what a median comes to."""
        if self._is_kept(median, self.goal):
            return Grade.GOAL_MET
        return Grade.MUST_MET if self._is_kept(median, self.must) else Grade.MISSED

    def _is_kept(self, median: float, limit: float) -> bool:
        return median >= limit if self.bound is Bound.AT_LEAST else median <= limit


TARGETS = (
    Target(LONE, TOKENS_PER_S_RATIO, 0.95, 0.98, Bound.AT_LEAST),
    Target(FEW, TOKENS_PER_S_RATIO, 0.95, 1.1, Bound.AT_LEAST),
    Target(MANY, TOKENS_PER_S_RATIO, 1.0, 1.3, Bound.AT_LEAST),
    Target(CROWD, TOKENS_PER_S_RATIO, 1.4, 2.0, Bound.AT_LEAST),
    Target(MANY, WORST_TTFT_RATIO, 0.8, 0.5, Bound.AT_MOST),
    Target(CROWD, WORST_TTFT_RATIO, 0.7, 0.4, Bound.AT_MOST),
    Target(LONG_AMONG_SHORT, TOKENS_PER_S_RATIO, 3.0, 4.5, Bound.AT_LEAST),
    Target(MIDDLE, TOKENS_PER_S_RATIO, 0.95, 1.2, Bound.AT_LEAST),
    Target(BESIDE, GAP_RATIO, 2.2, 2.0, Bound.AT_MOST),
    Target(BESIDE, PREFILL_TIME_RATIO, 3.5, 2.5, Bound.AT_MOST),
    Target(SHARED_PROMPT, CROWD_RATIO, 1.6, 1.3, Bound.AT_MOST),
    Target(RESTART_HITS, RESTART_RATIO, 0.15, 0.08, Bound.AT_MOST),
    Target(SHARED_PROMPT, RESTART_RATIO, 0.4, 0.15, Bound.AT_MOST),
    Target(CLOSED_LOOP, TTFT_TAIL_RATIO, 4.0, 2.5, Bound.AT_MOST),
    Target(MEMORY, MEMORY_RATIO, 1.25, 1.1, Bound.AT_MOST),
    Target(KV_BITS, BASELINE_RATIO, 3.0, 6.0, Bound.AT_LEAST),
)


@dataclasses.dataclass(frozen=True, slots=True)
class TargetResult:
    """One target, for one side, with what the rounds came to."""

    target: Target
    key: FigureKey
    spread: Spread

    @property
    def grade(self) -> Grade:
        """What the median comes to."""
        return self.target.grade(self.spread.median)

    @property
    def line(self) -> str:
        """The result as one line of text."""
        bound = self.target.bound.value
        return (
            f"{self.key.text}: {self.spread.text(3)}; must {bound} {self.target.must:g}, "
            f"goal {bound} {self.target.goal:g}: {self.grade.value}"
        )


def judge(figures: Iterable[Figure], targets: Sequence[Target] = TARGETS) -> list[TargetResult]:
    """Return every target that these figures speak to, in the table's order."""
    found: Mapping[FigureKey, Spread] = spreads(figures)
    return [
        TargetResult(target, key, spread)
        for target in targets
        for key, spread in found.items()
        if target.matches(key) and spread.count
    ]


def show_results(results: Sequence[TargetResult]) -> None:
    """Print each target with its bounds, what was measured, and what that comes to."""
    show_table(
        "Targets: must and goal, median (min to max) of the rounds",
        ("what", "must", "goal", "measured", ""),
        (
            (
                result.key.text,
                f"{result.target.bound.value} {result.target.must:g}",
                f"{result.target.bound.value} {result.target.goal:g}",
                result.spread.text(3),
                result.grade.value,
            )
            for result in results
        ),
    )
