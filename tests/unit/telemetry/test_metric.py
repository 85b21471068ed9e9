"""Quantiles of a histogram, as Prometheus finds them."""

from __future__ import annotations

import pytest
from icehouse_server.telemetry.call_metrics import FIRST_TOKEN_BY_REUSE
from icehouse_server.telemetry.metric import HistogramSeries
from icehouse_server.telemetry.prometheus import PrometheusMeter


@pytest.mark.parametrize(
    ("cumulative_counts", "share", "value"),
    [
        ((4, 4, 4), 0.5, 0.5),
        ((0, 4, 4), 0.25, 1.5),
        ((2, 4, 4), 0.75, 2.0),
        ((0, 0, 4), 0.5, 3.0),
        ((1, 1, 2), 0.5, 1.0),
        ((0, 0, 0), 0.5, None),
    ],
)
def test_values_lie_even_within_a_bucket(
    cumulative_counts: tuple[int, ...], share: float, value: float | None
) -> None:
    assert HistogramSeries((), (1.0, 3.0), cumulative_counts).quantile(share) == value


def test_the_meter_gives_back_what_it_observed() -> None:
    meter = PrometheusMeter()
    for seconds, reuse in ((0.003, "ram"), (0.003, "ram"), (3000.0, "ram"), (0.3, "cold")):
        meter.observe(FIRST_TOKEN_BY_REUSE, seconds, (reuse,))
    found = {series.labels: series for series in meter.series(FIRST_TOKEN_BY_REUSE)}
    assert set(found) == {("ram",), ("cold",)}
    ram = found[("ram",)]
    assert ram.bounds == FIRST_TOKEN_BY_REUSE.buckets and len(ram.counts) == len(ram.bounds) + 1
    assert (ram.counts[1], ram.counts[-1], sum(ram.counts)) == (2, 1, 3)
