"""`make bench CASE=load`: open-loop load at rising rates, our server beside mlx-lm's under the same arrivals.

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
import enum
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from bench.grpc_clients import Client
from bench.load_arrivals import poisson_arrivals
from bench.load_parts import ShortBesideLong, decode_alone_p50_s, short_beside_long
from bench.load_report import Findings, report, told
from bench.load_run import LoadPoint, Objective, play, summarize
from bench.load_targets import IcehouseTarget, MlxLmTarget, Target
from bench.mlx_lm_server import MlxLmServer
from bench.random_model import RandomModel, make_random_model
from bench.report import OUT, console
from bench.server_process import ServerProcess

CONNECTION_COUNT = 8


class Part(enum.Enum):
    """Parts that can be measured alone; by default all are."""

    SWEEP = "sweep"
    """Rising loads, compared with mlx-lm's server."""
    OURS = "ours"
    """Rising loads, our server alone."""
    LONG = "long"
    """Short prompts beside a long one, on a sliding-window model: there a very long one is feasible."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """The offered loads, and how long each is offered."""

    first_rate_per_s: float
    rate_factor: float
    duration_s: float
    point_limit: int
    long_token_count: int


FULL = Sweep(first_rate_per_s=0.5, rate_factor=1.5, duration_s=40.0, point_limit=10, long_token_count=30_000)
QUICK = Sweep(first_rate_per_s=1.0, rate_factor=2.5, duration_s=10.0, point_limit=3, long_token_count=3000)


def main() -> None:
    """Load both servers, print tables and verdicts, write bench/out/load.json and .png."""
    parser = argparse.ArgumentParser(prog="make bench CASE=load", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few loads, seconds each; under three minutes")
    parser.add_argument("--only", choices=[part.value for part in Part], help="measure this part alone")
    parser.add_argument("--long-tokens", type=int, help="tokens of the one long prompt")
    parser.add_argument("--first-rate", type=float, help="requests per second of the lowest load")
    parser.add_argument("--rate-factor", type=float, help="each load over the one before it")
    parser.add_argument("--points", type=int, help="most loads")
    parser.add_argument("--seconds", type=float, help="seconds of each load")
    parser.add_argument("--ttft-objective", type=float, default=1.0, help="seconds")
    parser.add_argument("--itl-objective", type=float, default=0.1, help="seconds, mean of a reply")
    arguments = parser.parse_args()
    wanted = {
        "long_token_count": arguments.long_tokens,
        "first_rate_per_s": arguments.first_rate,
        "rate_factor": arguments.rate_factor,
        "point_limit": arguments.points,
        "duration_s": arguments.seconds,
    }
    sweep = dataclasses.replace(
        QUICK if arguments.quick else FULL, **{k: v for k, v in wanted.items() if v is not None}
    )
    objective = Objective(ttft_s=arguments.ttft_objective, itl_s=arguments.itl_objective)
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    only = Part(arguments.only) if arguments.only else None
    found = asyncio.run(_measure(sweep, objective, only))
    report(found, name=f"load-{only.value}" if only else "load")
    console.print(f"{time.monotonic() - began:.0f} s in all")


async def _measure(sweep: Sweep, objective: Objective, only: Part | None) -> Findings:
    alone_p50_s: float | None = None
    points: list[LoadPoint] = []
    beside: ShortBesideLong | None = None
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as name:
        scratch = Path(name)
        if only in (None, Part.LONG):
            beside = await _measure_long(scratch, sweep.long_token_count)
        if only is not Part.LONG:
            alone_p50_s, points = await _measure_loads(scratch, sweep, objective, only)
    return Findings(objective=objective, alone_p50_s=alone_p50_s, points=points, beside=beside)


@contextlib.asynccontextmanager
async def _serving(model: Path, scratch: Path) -> AsyncIterator[list[Client]]:
    """Serve a model and return connections to it."""
    with ServerProcess(
        model=str(model), cache_directory=scratch / "blocks", log_file=OUT / "load.log"
    ) as ours:
        clients = [Client(ours.address) for _ in range(CONNECTION_COUNT)]
        yield clients
        for client in clients:
            await client.close()


async def _measure_long(scratch: Path, token_count: int) -> ShortBesideLong:
    model = make_random_model(scratch, which=RandomModel.WINDOWS)
    async with _serving(model, scratch) as clients:
        return await short_beside_long(*clients[:2], long_token_count=token_count)


async def _measure_loads(
    scratch: Path, sweep: Sweep, objective: Objective, only: Part | None
) -> tuple[float, list[LoadPoint]]:
    """Return p50 between tokens of replies alone, and the points of every load."""
    model = make_random_model(scratch, which=RandomModel.SMALL)
    async with _serving(model, scratch) as clients:
        alone_p50_s = await decode_alone_p50_s(clients)
        targets: list[Target] = [IcehouseTarget(clients)]
        if only is Part.OURS:
            return alone_p50_s, await _sweep(sweep, objective, targets)
        with MlxLmServer(model_path=model, log_file=OUT / "load-mlx-lm.log") as theirs:
            targets.append(MlxLmTarget(theirs.port))
            return alone_p50_s, await _sweep(sweep, objective, targets)


async def _sweep(sweep: Sweep, objective: Objective, targets: Sequence[Target]) -> list[LoadPoint]:
    """Offer rising loads to each target in turn, the order alternating, until the last target has enough."""
    points: list[LoadPoint] = []
    rate_per_s = sweep.first_rate_per_s
    for number in range(sweep.point_limit):
        arrivals = poisson_arrivals(rate_per_s=rate_per_s, duration_s=sweep.duration_s, seed=number)
        for target in targets if number % 2 == 0 else reversed(targets):
            replies, elapsed_s = await play(target, arrivals)
            points.append(
                summarize(target, replies, offered_per_s=rate_per_s, elapsed_s=elapsed_s, objective=objective)
            )
            console.print(told(points[-1]), highlight=False)
        if [point for point in points if point.target == targets[-1].name][-1].is_saturated:
            break
        rate_per_s *= sweep.rate_factor
    return points


if __name__ == "__main__":
    main()
