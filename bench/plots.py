"""The benches' plots, drawn without a display into `bench/out/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from bench.cases.figure import FigureKey
from bench.cases.target import Grade, TargetResult
from bench.cases.together import RATE, WORST_TTFT
from bench.report import OUT, Spread


def plot_throughput(found: Mapping[FigureKey, Spread], results: Sequence[TargetResult]) -> Path:
    """Draw tokens per second and worst TTFT by case and side, and the targets; return the file."""
    figure, (rate, ttft, ratio) = pyplot.subplots(1, 3, figsize=(19, 6), width_ratios=(1, 1, 1.3))
    _sides(rate, found, name=RATE, title="Output tokens per second, prompts included", scale="linear")
    _sides(ttft, found, name=WORST_TTFT, title="Worst time to first token, s", scale="log")
    _targets(ratio, results)
    figure.suptitle("Medians over the rounds of one run, bars from least to most")
    return save(figure, "throughput")


def _sides(axes: Any, found: Mapping[FigureKey, Spread], *, name: str, title: str, scale: str) -> None:
    """Draw one figure of every case, side by side."""
    axes.set_title(title)
    keys = [key for key in found if key.name == name]
    if not keys:
        return
    cases = list(dict.fromkeys(key.case for key in keys))
    sides = list(dict.fromkeys(key.side for key in keys))
    for number, side in enumerate(sides):
        own = [key for key in keys if key.side is side]
        places = [cases.index(key.case) + 0.15 * number for key in own]
        _points(axes, places, [found[key] for key in own], label=side.value)
    axes.set_xticks(range(len(cases)), cases, rotation=30, ha="right")
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=0)
    axes.legend()


def _targets(axes: Any, results: Sequence[TargetResult]) -> None:
    """Draw each result divided by its target, so that 1 is the bound for all."""
    axes.set_title("Measured / must; blue: goal / must")
    if not results:
        return
    for row, result in enumerate(results):
        must, spread = result.target.must, result.spread
        below, above = spread.median - spread.minimum, spread.maximum - spread.median
        colour = "tab:red" if result.grade is Grade.MISSED else "tab:green"
        axes.errorbar(
            [spread.median / must], [row], xerr=([below / must], [above / must]), marker="o", color=colour
        )
        axes.plot([result.target.goal / must], [row], marker="|", markersize=14, color="tab:blue")
    labels = [f"{r.key.text} ({r.target.bound.value} {r.target.must:g})" for r in results]
    axes.set_yticks(range(len(results)), labels, fontsize=7)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.invert_yaxis()


def save(figure: Any, name: str) -> Path:
    """Write `bench/out/<name>.png` and return its path."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _points(axes: Any, places: Sequence[float], spreads: Sequence[Spread], *, label: str) -> None:
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.minimum for spread in spreads]
    above = [spread.maximum - spread.median for spread in spreads]
    axes.errorbar(places, medians, yerr=(below, above), marker="o", linestyle="none", capsize=3, label=label)


def plot_cache(seconds: dict[str, Spread], costs: dict[str, Spread]) -> Path:
    """Draw the TTFTs and the cost for decode of the cache's work; return the file."""
    figure, (ttft, decode) = pyplot.subplots(1, 2, figsize=(12, 4))
    _bars(ttft, seconds, title="Time to first token, s")
    _bars(decode, costs, title="Inter-token time, ratio")
    decode.axvline(1.0, color="grey", linewidth=0.8)
    figure.suptitle("Medians over the rounds of one run, bars from least to most")
    return save(figure, "cache")


def _bars(axes: Any, spreads: dict[str, Spread], *, title: str) -> None:
    found = {name: spread for name, spread in spreads.items() if spread.count}
    medians = [spread.median for spread in found.values()]
    below = [spread.median - spread.minimum for spread in found.values()]
    above = [spread.maximum - spread.median for spread in found.values()]
    axes.barh(list(found), medians, xerr=(below, above), capsize=3)
    axes.invert_yaxis()
    axes.set_title(title)
