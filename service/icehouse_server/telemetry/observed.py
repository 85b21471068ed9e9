"""Metrics that are read from a snapshot: a declaration and how its values are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from icehouse_server.domain.stats import Snapshot
from icehouse_server.telemetry.metric import Kind, Metric

Value = tuple[tuple[str, ...], float]
"""Label values in the order of the metric's labels, and the number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """One row of the table. `read` yields nothing where the snapshot knows nothing."""

    metric: Metric
    read: Callable[[Snapshot], Iterable[Value]]


def counter(
    name: str,
    unit: str,
    description: str,
    read: Callable[[Snapshot], Iterable[Value]],
    *labels: str,
) -> Observed:
    """Return a row that only grows."""
    return Observed(Metric(name, Kind.COUNTER, unit, description, labels), read)


def gauge(
    name: str,
    unit: str,
    description: str,
    read: Callable[[Snapshot], Iterable[Value]],
    *labels: str,
) -> Observed:
    """Return a row that goes up and down."""
    return Observed(Metric(name, Kind.GAUGE, unit, description, labels), read)


def one(value: float | None) -> Iterator[Value]:
    """Yield a value without labels, or nothing for None."""
    if value is not None:
        yield (), value
