"""The load bench's plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot

from bench.load_run import LoadPoint
from bench.plots import save


def plot_load(points: Sequence[LoadPoint]) -> Path:
    """Draw throughput, goodput and TTFT over offered load, a line per server; return the file."""
    figure, (rate, good, ttft) = pyplot.subplots(1, 3, figsize=(13, 4))
    for name in dict.fromkeys(point.target for point in points):
        mine = [point for point in points if point.target == name]
        offered = [point.offered_per_s for point in mine]
        rate.plot(offered, [point.tokens_per_s for point in mine], marker="o", label=name)
        good.plot(offered, [point.goodput_per_s for point in mine], marker="o", label=name)
        ttft.plot(offered, [point.ttft.p95_s for point in mine], marker="o", label=name)
    titles = ("Output tokens per second", "Replies within the objective per second", "p95 TTFT, s")
    for axes, title in zip((rate, good, ttft), titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel("requests offered per second")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle("Poisson arrivals of short, long and shared prompts, the same for both servers")
    return save(figure, "load")
