"""Report of the load bench: tables, verdicts on the targets, files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.load_parts import ALONE_CLIENTS, ShortBesideLong
from bench.load_plot import plot_load
from bench.load_run import STOP_TTFT_S, LoadPoint, Objective, Percentiles, goodput_ratio_at_stop
from bench.report import Verdict, console, setting, show_table, show_verdicts, spread_of, write_json

_CHUNK_S = 0.1
"""How long a new request may wait for the current chunk of a long prefill; allowed on top of the ratio."""


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """The results of one run; a part that was not measured is empty or None."""

    objective: Objective
    alone_p50_s: float | None
    points: Sequence[LoadPoint]
    beside: ShortBesideLong | None

    def of(self, name: str) -> list[LoadPoint]:
        """Return one server's points, the lowest load first."""
        return [point for point in self.points if point.target == name]


def report(found: Findings, *, name: str) -> None:
    """Print tables and verdicts; write bench/out/<name>.json and, where loads were offered, the plot."""
    verdicts: list[Verdict] = []
    if found.points and found.alone_p50_s:
        console.print(
            f"decode of {ALONE_CLIENTS} alone: p50 {1000 * found.alone_p50_s:.1f} ms between tokens"
        )
        _show_points(found)
        verdicts += _load_verdicts(found, found.alone_p50_s)
    if found.beside:
        verdicts.append(_beside_verdict(found.beside))
    show_verdicts(verdicts)
    content = {"setting": setting(), **dataclasses.asdict(found)}
    console.print(str(write_json(name, content)))
    if found.points:
        console.print(str(plot_load(found.points)))


def told(point: LoadPoint) -> str:
    """Return one line of progress."""
    return (
        f"{point.offered_per_s:6.2f}/s {point.target:9s} {point.arrival_count} asked, {point.failed_count} "
        f"failed, TTFT p95 {point.ttft.p95_s:.2f} s, good {point.goodput_per_s:.2f}/s"
    )


def _show_points(found: Findings) -> None:
    objective = found.objective
    show_table(
        f"Goodput: TTFT within {objective.ttft_s} s and mean inter-token time within {objective.itl_s} s",
        (
            *("offered/s", "server", "failed", "tokens/s", "good/s"),
            *("TTFT ms p50 p95 p99", "ITL ms p50 p95 p99", "slowest 1 % of gaps"),
        ),
        (
            (
                f"{p.offered_per_s:.2f}",
                p.target,
                f"{p.failed_count}/{p.arrival_count}",
                f"{p.tokens_per_s:.0f}",
                f"{p.goodput_per_s:.2f}",
                _milliseconds(p.ttft),
                _milliseconds(p.itl),
                ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in p.slow_gap_kinds.items()),
            )
            for p in found.points
        ),
    )


def _load_verdicts(found: Findings, alone_p50_s: float) -> list[Verdict]:
    ours, theirs = found.of("icehouse"), found.of("mlx-lm")
    if theirs:
        console.print(
            f"at {ours[-1].offered_per_s:.2f}/s mlx-lm's p95 TTFT is {theirs[-1].ttft.p95_s:.2f} s"
            + ("" if theirs[-1].is_saturated else f" (never past {STOP_TTFT_S:g} s: the loads were too low)")
            + f"; good replies {ours[-1].goodput_per_s:.2f}/s and {theirs[-1].goodput_per_s:.2f}/s"
        )
    unsaturated = [point for point in theirs or ours if not point.is_saturated]
    mixed = ours[max(0, len(unsaturated) - 1)]
    verdicts = [
        Verdict(
            f"p99 inter-token at {mixed.offered_per_s:.2f}/s / p50 of decode alone",
            spread_of([mixed.itl.p99_s / alone_p50_s]),
            2.0,
            at_least=False,
        )
    ]
    if theirs:
        goodput = Verdict(
            f"goodput, icehouse / mlx-lm, where mlx-lm's p95 TTFT is {STOP_TTFT_S:g} s",
            spread_of([goodput_ratio_at_stop(ours, theirs)]),
            1.5,
            at_least=True,
        )
        verdicts.insert(0, goodput)
    return verdicts


def _beside_verdict(beside: ShortBesideLong) -> Verdict:
    console.print(
        f"short prompts beside a prefill of {beside.long_token_count} tokens ({beside.long_ttft_s:.1f} s, "
        f"{beside.busy_count} asked meanwhile): p95 TTFT {1000 * beside.busy_p95_s:.0f} ms, "
        f"idle {1000 * beside.idle_p95_s:.0f} ms"
    )
    slice_s = _CHUNK_S
    return Verdict(
        f"p95 TTFT of short prompts beside a long prefill, less one slice of {slice_s:g} s / idle",
        spread_of([(beside.busy_p95_s - slice_s) / beside.idle_p95_s]),
        3.0,
        at_least=False,
    )


def _milliseconds(found: Percentiles) -> str:
    values = (found.p50_s, found.p95_s, found.p99_s)
    return " ".join(f"{1000 * value:.0f}" for value in values)
