"""Metric: its OpenTelemetry name, unit and meaning, and the Prometheus name derived from them."""

from __future__ import annotations

import dataclasses
import enum

_UNIT_SUFFIXES = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second", "1": "_ratio"}


class MetricKind(enum.Enum):
    """How a metric's values are to be read."""

    COUNTER = enum.auto()
    """Only grows, from 0 at the start of the process."""
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A metric's declaration. `unit` is UCUM, with {braces} around what is counted."""

    name: str
    kind: MetricKind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    """Attribute names, dotted as OpenTelemetry writes them."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in the metric's unit."""

    @property
    def prometheus_name(self) -> str:
        """The name as OpenTelemetry translates it: dots to underscores, the unit, `_total` for counters."""
        # A unit such as {token}/s is a rate; a count in braces adds no suffix.
        suffix = "_per_second" if self.unit.endswith("}/s") else _UNIT_SUFFIXES.get(self.unit, "")
        if self.kind is MetricKind.COUNTER and self.unit == "1":
            suffix = ""
        total = "_total" if self.kind is MetricKind.COUNTER else ""
        base = self.name.replace(".", "_")
        return f"{base}{'' if base.endswith(suffix) else suffix}{total}"

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        return tuple(label.replace(".", "_") for label in self.labels)


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramSeries:
    """A histogram's counts for one value of its labels."""

    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    """Upper bounds of the buckets; one more bucket holds everything above the last."""
    cumulative_counts: tuple[int, ...]
    """How many values are up to each bound, then how many there are."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values are in each bucket; the last is above all bounds."""
        before = (0, *self.cumulative_counts)
        return tuple(now - below for below, now in zip(before, self.cumulative_counts, strict=False))

    def quantile(self, share: float) -> float | None:
        """Return the value below which `share` of all values are, interpolated in a bucket as by Prometheus.

        Values above all bounds count as the last bound; None if there are no values.
        """
        total = self.cumulative_counts[-1]
        if not total:
            return None
        rank, lower = share * total, 0.0
        for bound, reached, count in zip(self.bounds, self.cumulative_counts, self.counts, strict=False):
            if reached >= rank and count:
                return lower + (bound - lower) * (rank - (reached - count)) / count
            lower = bound
        return lower
