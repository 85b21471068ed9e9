"""Figure: one number of one round, and the names by which targets find theirs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from bench.report import Spread, spread_of


class Unit(enum.Enum):
    """What a figure counts."""

    RATIO = "ratio"
    SECONDS = "s"
    TOKENS_PER_S = "tokens/s"
    TOKENS = "tokens"
    BYTES = "bytes"


class Side(enum.Enum):
    """Who was measured, or how it was asked."""

    ENGINE = "engine"
    CACHE_OFF = "cache off"
    CACHE_ON = "cache on"
    NONE = ""
    """The case has one side only."""


@dataclasses.dataclass(frozen=True, slots=True)
class FigureKey:
    """What was measured: figures of one key over the rounds make one spread."""

    case: str
    name: str
    side: Side = Side.NONE
    unit: Unit = Unit.RATIO

    @property
    def text(self) -> str:
        """The key in words."""
        return ", ".join(part for part in (self.case, self.name, self.side.value) if part)


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One number of one round."""

    key: FigureKey
    value: float


TOKENS_PER_S_RATIO = "tokens/s / engine"
WORST_TTFT_RATIO = "worst first token / engine"
MEDIAN_TTFT_RATIO = "median first token / engine"
DECODE_RATIO = "decode alone, tokens/s / engine"
GAP_RATIO = "p99 between tokens / p50 of decode alone"
PREFILL_TIME_RATIO = "prefill's time / its time alone"
CROWD_RATIO = "worst first token / of one alone"
RESTART_RATIO = "worst first token after a restart / cold"
TTFT_TAIL_RATIO = "p99 / p50 of time to first token"
MEMORY_RATIO = "peak above weights / the rows' own KV"
BASELINE_RATIO = "tokens/s / baseline"


def spreads(figures: Iterable[Figure]) -> dict[FigureKey, Spread]:
    """Return the spread of each key over the rounds, in the order of their first figures."""
    values: dict[FigureKey, list[float]] = {}
    for figure in figures:
        values.setdefault(figure.key, []).append(figure.value)
    return {key: spread_of(found) for key, found in values.items()}


def of_unit(figures: Sequence[Figure], unit: Unit) -> list[Figure]:
    """Return the figures that count `unit`."""
    return [figure for figure in figures if figure.key.unit is unit]
