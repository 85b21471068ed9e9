"""The benches' plots, drawn without a display into `bench/out/`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from bench.report import OUT, Spread


def plot_throughput(rows: Sequence[dict[str, Any]]) -> Path:
    """Draw tokens per second, TTFT and ratios over the number of clients; return the file."""
    figure, (rate, ttft, ratio) = pyplot.subplots(1, 3, figsize=(13, 4))
    places = range(len(rows))
    for side, label in (("server", "server over gRPC"), ("engine", "engine in process")):
        _line(rate, places, [row[side]["tokens_per_s"] for row in rows], label=label)
        _line(ttft, places, [row[side]["ttft_p50_s"] for row in rows], label=f"{label}, p50")
    for key, label in (("tokens_per_s_ratio", "tokens/s"), ("decode_ratio", "decode only")):
        _line(ratio, places, [row[key] for row in rows], label=label)
    ratio.axhline(1.0, color="grey", linewidth=0.8)
    titles = ("Output tokens per second", "Time to first token, s", "Server / in process")
    for axes, title in zip((rate, ttft, ratio), titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel("clients")
        axes.set_xticks(places, [str(row["clients"]) for row in rows])
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle("Medians over the rounds of one run, bars from least to most")
    return save(figure, "throughput")


def save(figure: Any, name: str) -> Path:
    """Write `bench/out/<name>.png` and return its path."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _line(axes: Any, places: Sequence[int], spreads: Sequence[Spread], *, label: str) -> None:
    """Draw medians joined by a line; a case that no round measured leaves a gap."""
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.minimum for spread in spreads]
    above = [spread.maximum - spread.median for spread in spreads]
    axes.errorbar(places, medians, yerr=(below, above), marker="o", capsize=3, label=label)


def plot_cache(seconds: dict[str, Spread], costs: dict[str, Spread]) -> Path:
    """Draw the TTFTs and what decode pays beside the cache's work; return the file."""
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
