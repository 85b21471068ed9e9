"""`make bench-load`: open-loop load at rising rates, our server beside mlx-lm's under the same arrivals.

Poisson arrivals of short prompts, long prompts and questions about shared pages; latency percentiles and
goodput (replies per second within the objective) at each offered load, up to where mlx-lm's p95 TTFT passes
3 s. Then two ratios of our server alone: inter-token times under the mix over decode alone, and first
tokens of short prompts beside one long prefill over idle ones. The model has random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.grpc_clients import Client
from bench.load_arrivals import poisson_arrivals
from bench.load_parts import ALONE_CLIENTS, ShortBesideLong, decode_alone_p50_s, short_beside_long
from bench.load_plot import plot_load
from bench.load_run import (
    STOP_TTFT_S,
    LoadPoint,
    Objective,
    Percentiles,
    goodput_ratio_at_stop,
    play,
    summarize,
)
from bench.load_targets import IcehouseTarget, MlxLmTarget, Target
from bench.mlx_lm_server import MlxLmServer
from bench.random_model import make_random_model
from bench.report import (
    OUT,
    Verdict,
    console,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.server_process import ServerProcess

CONNECTION_COUNT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """Which loads are offered, and for how long each."""

    first_rate_per_s: float
    rate_factor: float
    duration_s: float
    point_limit: int
    long_token_count: int


FULL = Sweep(first_rate_per_s=0.5, rate_factor=1.5, duration_s=40.0, point_limit=10, long_token_count=16_000)
QUICK = Sweep(first_rate_per_s=1.0, rate_factor=2.5, duration_s=10.0, point_limit=3, long_token_count=3000)


def main() -> None:
    """Load both servers, print tables and verdicts, write bench/out/load.json and .png."""
    parser = argparse.ArgumentParser(prog="make bench-load", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few loads, seconds each; under three minutes")
    parser.add_argument("--long-tokens", type=int, help="tokens of the one long prompt")
    parser.add_argument("--ttft-objective", type=float, default=1.0, help="seconds")
    parser.add_argument("--itl-objective", type=float, default=0.1, help="seconds, mean of a reply")
    arguments = parser.parse_args()
    sweep = QUICK if arguments.quick else FULL
    if arguments.long_tokens:
        sweep = dataclasses.replace(sweep, long_token_count=arguments.long_tokens)
    objective = Objective(ttft_s=arguments.ttft_objective, itl_s=arguments.itl_objective)
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    asyncio.run(_measure(sweep, objective))
    console.print(f"{time.monotonic() - began:.0f} s in all")


async def _measure(sweep: Sweep, objective: Objective) -> None:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = make_random_model(scratch, is_small=True)
        with ServerProcess(
            model=str(path), cache_directory=scratch / "blocks", log_file=OUT / "load.log"
        ) as ours:
            clients = [Client(ours.address) for _ in range(CONNECTION_COUNT)]
            alone_p50_s = await decode_alone_p50_s(clients)
            beside = await short_beside_long(*clients[:2], long_token_count=sweep.long_token_count)
            theirs = stack.enter_context(MlxLmServer(model_path=path, log_file=OUT / "load-mlx-lm.log"))
            points = await _sweep(sweep, objective, [IcehouseTarget(clients), MlxLmTarget(theirs.port)])
            for client in clients:
                await client.close()
    _report(points, alone_p50_s, beside, objective)


async def _sweep(sweep: Sweep, objective: Objective, targets: Sequence[Target]) -> list[LoadPoint]:
    """Offer rising loads to each target in turn, the order alternating."""
    points: list[LoadPoint] = []
    rate_per_s = sweep.first_rate_per_s
    for number in range(sweep.point_limit):
        arrivals = poisson_arrivals(rate_per_s=rate_per_s, duration_s=sweep.duration_s, seed=number)
        for target in targets if number % 2 == 0 else reversed(targets):
            replies, elapsed_s = await play(target, arrivals)
            points.append(
                summarize(target, replies, offered_per_s=rate_per_s, elapsed_s=elapsed_s, objective=objective)
            )
            console.print(_row(points[-1]), highlight=False)
        if _of(points, "mlx-lm")[-1].is_saturated:
            break
        rate_per_s *= sweep.rate_factor
    return points


def _of(points: Sequence[LoadPoint], name: str) -> list[LoadPoint]:
    return [point for point in points if point.target == name]


def _row(point: LoadPoint) -> str:
    """Return one line that tells the run while it goes on."""
    return (
        f"{point.offered_per_s:6.2f}/s {point.target:9s} {point.arrival_count} asked, {point.failed_count} "
        f"failed, TTFT p95 {point.ttft.p95_s:.2f} s, good {point.goodput_per_s:.2f}/s"
    )


def _report(
    points: Sequence[LoadPoint], alone_p50_s: float, beside: ShortBesideLong, objective: Objective
) -> None:
    show_table(
        f"Goodput: TTFT within {objective.ttft_s} s and mean inter-token time within {objective.itl_s} s",
        ("offered/s", "server", "failed", "tokens/s", "good/s", "TTFT ms p50 p95 p99", "ITL ms p50 p95 p99"),
        (
            (
                f"{p.offered_per_s:.2f}",
                p.target,
                f"{p.failed_count}/{p.arrival_count}",
                f"{p.tokens_per_s:.0f}",
                f"{p.goodput_per_s:.2f}",
                _milliseconds(p.ttft),
                _milliseconds(p.itl),
            )
            for p in points
        ),
    )
    ours, theirs = _of(points, "icehouse"), _of(points, "mlx-lm")
    saturated = theirs[-1].is_saturated
    console.print(
        f"at {ours[-1].offered_per_s:.2f}/s mlx-lm's p95 TTFT is {theirs[-1].ttft.p95_s:.2f} s"
        + ("" if saturated else f" (never past {STOP_TTFT_S:g} s: the loads were too low)")
        + f"; good replies {ours[-1].goodput_per_s:.2f}/s and {theirs[-1].goodput_per_s:.2f}/s"
    )
    console.print(
        f"short prompts beside a prefill of {beside.long_token_count} tokens ({beside.long_ttft_s:.1f} s, "
        f"{beside.busy_count} asked meanwhile): p95 TTFT {1000 * beside.busy_p95_s:.0f} ms, "
        f"idle {1000 * beside.idle_p95_s:.0f} ms; decode of {ALONE_CLIENTS} alone {1000 * alone_p50_s:.1f} ms"
    )
    unsaturated = [p for p, other in zip(ours, theirs, strict=True) if not other.is_saturated]
    mixed = (unsaturated or ours)[-1]
    show_verdicts(
        [
            Verdict(
                f"goodput, icehouse / mlx-lm, where mlx-lm's p95 TTFT is {STOP_TTFT_S:g} s",
                spread_of([goodput_ratio_at_stop(ours, theirs)]),
                1.5,
                at_least=True,
            ),
            Verdict(
                f"p99 inter-token at {mixed.offered_per_s:.2f}/s / p50 of decode alone",
                spread_of([mixed.itl.p99_s / alone_p50_s]),
                2.0,
                at_least=False,
            ),
            Verdict(
                "p95 TTFT of short prompts beside a long prefill / idle",
                spread_of([beside.busy_p95_s / beside.idle_p95_s]),
                3.0,
                at_least=False,
            ),
        ]
    )
    content = {"setting": setting(), "objective": objective, "points": points, "beside_long": beside}
    console.print(str(write_json("load", {**content, "decode_alone_p50_s": alone_p50_s})))
    console.print(str(plot_load(points)))


def _milliseconds(found: Percentiles) -> str:
    values = (found.p50_s, found.p95_s, found.p99_s)
    return " ".join(f"{1000 * value:.0f}" for value in values)


if __name__ == "__main__":
    main()
