"""Metric: its OpenTelemetry name, unit and meaning, and the Prometheus name that follows from them."""

from __future__ import annotations

import dataclasses
import enum

_UNIT_SUFFIXES = {"s": "_seconds", "By": "_bytes", "By/s": "_bytes_per_second", "1": "_ratio"}


class Kind(enum.Enum):
    """How a metric's values are to be read."""

    COUNTER = enum.auto()
    """Only grows, from the start of the process."""
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A declaration. `unit` is UCUM, with {braces} around what is counted."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    """Attribute names, dotted as OpenTelemetry writes them."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in the metric's unit."""

    @property
    def prometheus_name(self) -> str:
        """OpenTelemetry's own translation: dots to underscores, the unit, `_total` for counters."""
        # {token}/s and the like name a rate; a count in braces alone adds nothing.
        suffix = "_per_second" if self.unit.endswith("}/s") else _UNIT_SUFFIXES.get(self.unit, "")
        if self.kind is Kind.COUNTER and self.unit == "1":
            suffix = ""
        total = "_total" if self.kind is Kind.COUNTER else ""
        base = self.name.replace(".", "_")
        return f"{base}{'' if base.endswith(suffix) else suffix}{total}"

    @property
    def prometheus_labels(self) -> tuple[str, ...]:
        """The labels as Prometheus spells them."""
        return tuple(label.replace(".", "_") for label in self.labels)
