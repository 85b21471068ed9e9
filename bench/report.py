"""Medians with their spread, the terminal's table, and the files in `bench/out/`."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.replies import quantile
from bench.server_process import ROOT

OUT = ROOT / "bench" / "out"
console = Console(width=None if sys.stdout.isatty() else 140)
"""A file or a pipe has no width of its own, and narrow tables are hard to read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and extremes of one number over the rounds; empty when no round had it."""

    count: int
    median: float
    low_quartile: float
    high_quartile: float
    minimum: float
    maximum: float

    def number(self, digits: int = 2) -> str:
        """Return the median, or a dash without rounds."""
        return f"{self.median:.{digits}f}" if self.count else "-"

    def text(self, digits: int = 2) -> str:
        """Return `median (min to max)`, or a dash without rounds."""
        if not self.count:
            return "-"
        return f"{self.median:.{digits}f} ({self.minimum:.{digits}f} to {self.maximum:.{digits}f})"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One target, as a bound on a median of this run."""

    what: str
    spread: Spread
    bound: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether the median keeps the bound."""
        if not self.spread.count:
            return False
        return self.spread.median >= self.bound if self.at_least else self.spread.median <= self.bound


def spread_of(values: Iterable[float | None]) -> Spread:
    """Return the spread of the numbers that are not None."""
    found = [value for value in values if value is not None]
    return Spread(
        count=len(found),
        median=quantile(found, 0.5),
        low_quartile=quantile(found, 0.25),
        high_quartile=quantile(found, 0.75),
        minimum=min(found, default=float("nan")),
        maximum=max(found, default=float("nan")),
    )


def ratios(above: Sequence[float | None], below: Sequence[float | None]) -> Spread:
    """Return the spread of the ratios within each round, so that slow minutes hit both sides."""
    pairs = zip(above, below, strict=True)
    return spread_of(a / b for a, b in pairs if a is not None and b is not None)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the first column names the row."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print each target with its measurement."""
    show_table(
        "Targets",
        ("what", "target", "median (min to max)", ""),
        (
            (
                v.what,
                f"{'>=' if v.at_least else '<='} {v.bound}",
                v.spread.text(3),
                "met" if v.is_met else "MISSED",
            )
            for v in verdicts
        ),
    )


def setting() -> dict[str, Any]:
    """Return facts about the machine and software of the measurement."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "grpcio", "protobuf")},
        "python": platform.python_version(),
    }


def write_json(name: str, content: dict[str, Any]) -> Path:
    """Write `bench/out/<name>.json` and return its path."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n", encoding="utf-8")
    return path


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"no JSON for {type(value).__name__}")
