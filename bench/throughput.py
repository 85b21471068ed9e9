"""`make bench`: what a caller waits for, server over gRPC against in-process BatchGenerator of mlx-lm.

Wall clock from the first request to the last token, prompts included, and times to first token, in rounds
of one run: each measures every case, and the side that goes first takes turns. Ratios are taken within a
round; medians and spreads are over the rounds, of which as many run as fit in `--minutes`. Both sides are
warm (bench.lone measures servers that are not), have the same weights and type, and OpenBLAS where the
server would load it. Every prompt is new, sent as tokens; replies are greedy.

The default model is made of random weights (bench.random_model): a step of it is short, so that what the
server adds to a step shows. `--model demo` measures the real one, more slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases.beside import measure_beside
from bench.cases.closed_loop import measure_closed_loop
from bench.cases.crowd import measure_crowds
from bench.cases.figure import Figure, Side, Unit, of_unit, spreads
from bench.cases.kv_bits import measure_kv_bits
from bench.cases.memory import measure_memory
from bench.cases.sizes import FULL, QUICK, Sizes
from bench.cases.target import judge, show_results
from bench.cases.testbed import ENGINE_SIZES, Testbed
from bench.cases.together import arrivals_of_clients, arrivals_of_mixes, measure_arrivals
from bench.model_folder import model_path
from bench.plots import plot_throughput
from bench.report import OUT, Spread, console, setting, show_table, write_json

CASES = ("clients", "mixes", "beside", "crowds", "closed-loop", "memory", "kv-bits")
_SIDES = {"off": Side.CACHE_OFF, "on": Side.CACHE_ON}
_SEED = 1
_DIGITS = {Unit.TOKENS_PER_S: 1, Unit.TOKENS: 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The cases to measure, and how often."""

    cases: tuple[str, ...]
    sides: tuple[Side, ...]
    round_limit: int
    time_limit_s: float
    sizes: Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """The results of the rounds."""

    rounds: list[list[Figure]] = dataclasses.field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        """Every figure of every round."""
        return [figure for found in self.rounds for figure in found]


def main() -> None:
    """Measure, print the tables, write bench/out/throughput.json and .png."""
    arguments = _arguments()
    sizes = QUICK if arguments.quick else FULL
    plan = Plan(
        cases=tuple(arguments.cases),
        sides=tuple(_SIDES[mode] for mode in arguments.cache),
        round_limit=arguments.rounds or (1 if arguments.quick else 5),
        time_limit_s=60 * arguments.minutes,
        sizes=dataclasses.replace(sizes, client_counts=tuple(arguments.clients or sizes.client_counts)),
    )
    began = time.monotonic()
    found = Findings()
    gc.collect()
    gc.freeze()  # no full collection between two tokens
    try:
        asyncio.run(_measure(arguments, plan, found))
    finally:
        # An aborted run has results too.
        if found.rounds:
            _report(found, plan, model=arguments.model, duration_s=time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of small sizes, to see it run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--cache", nargs="+", choices=_SIDES, default=tuple(_SIDES), help="clients and mixes")
    parser.add_argument("--clients", type=int, nargs="+", help="callers that come together")
    parser.add_argument("--rounds", type=int, help="most rounds")
    parser.add_argument("--minutes", type=float, default=20.0, help="no round begins that would end later")
    parser.add_argument("--model", default="thin", help="thin, large, or as for icehouse serve")
    parser.add_argument("--serve-flags", default="", help="more flags for icehouse serve, in one string")
    parser.add_argument(
        "--baseline", default="", help="another tree's command up to and without `serve`, for kv-bits"
    )
    return parser.parse_args()


async def _measure(arguments: argparse.Namespace, plan: Plan, found: Findings) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "throughput.log"
    log_file.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as folder:
        scratch = Path(folder)
        path = model_path(arguments.model, scratch)
        console.print(f"starting the server and the engine in process with {path.name}")
        testbed = Testbed(
            model_path=path,
            scratch=scratch,
            log_file=log_file,
            flags=shlex.split(arguments.serve_flags),
            baseline=shlex.split(arguments.baseline),
            sizes=plan.sizes,
        )
        async with testbed.opened(seed=_SEED):
            for round_index in range(plan.round_limit):
                elapsed_s = time.monotonic() - began
                if not fits_another_round(elapsed_s, round_index, limit_s=plan.time_limit_s):
                    console.print(f"no time for another round after {elapsed_s:.0f} s")
                    break
                found.rounds.append([])
                for case in plan.cases:
                    figures = await _measure_case(testbed, case, plan, round_index)
                    found.rounds[-1].extend(figures)
                    _tell(figures, case)
                console.print(f"round {round_index + 1} of at most {plan.round_limit} done")


def fits_another_round(elapsed_s: float, done_count: int, *, limit_s: float) -> bool:
    """Whether another round as long as the earlier ones would end in time; the first one always runs."""
    return done_count == 0 or elapsed_s * (done_count + 1) / done_count <= limit_s


async def _measure_case(testbed: Testbed, case: str, plan: Plan, round_index: int) -> list[Figure]:
    if case == "beside":
        return await measure_beside(testbed)
    if case == "crowds":
        return await measure_crowds(testbed, round_index=round_index)
    if case == "closed-loop":
        return await measure_closed_loop(testbed, seed=_SEED + round_index)
    if case == "memory":
        return await measure_memory(testbed, round_index=round_index)
    if case == "kv-bits":
        return await measure_kv_bits(testbed, round_index=round_index)
    make = arrivals_of_clients if case == "clients" else arrivals_of_mixes
    figures: list[Figure] = []
    for arrivals in make(plan.sizes):
        figures += await measure_arrivals(testbed, arrivals, sides=plan.sides, turn=round_index)
    return figures


def _tell(figures: Sequence[Figure], case: str) -> None:
    """Print a round's results for a case's targets during the run."""
    results = judge(figures)
    for result in results:
        console.print(f"  {result.line}")
    if not results:
        console.print(f"  {case}: no target" + (" without --baseline" if case == "kv-bits" else ""))


def _report(found: Findings, plan: Plan, *, model: str, duration_s: float) -> None:
    figures = found.figures
    for unit, title in (
        (Unit.RATIO, "Ratios within a round: median (min to max)"),
        (Unit.TOKENS_PER_S, "Tokens per second, this machine and moment only"),
        (Unit.SECONDS, "Seconds, this machine and moment only"),
    ):
        rows = [
            (key.case, key.name, key.side.value, spread.text(_DIGITS.get(unit, 3)))
            for key, spread in spreads(of_unit(figures, unit)).items()
        ]
        if rows:
            show_table(title, ("case", "what", "side", "median (min to max)"), rows)
    results = judge(figures)
    show_results(results)
    if plan.sizes != FULL:
        console.print("the sizes are not all those of the targets' table")
    content: dict[str, Any] = {
        "setting": setting(),
        "model": model,
        "engine": ENGINE_SIZES,
        "sizes": plan.sizes,
        "cases": plan.cases,
        "round_count": len(found.rounds),
        "duration_s": duration_s,
        "targets": [
            {"what": r.key.text, "must": r.target.must, "goal": r.target.goal, "result": r.grade.value}
            | {"bound": r.target.bound.value, "spread": r.spread}
            for r in results
        ],
        "figures": [_entry(key.text, key.unit, s) for key, s in spreads(figures).items()],
        "rounds": [[(f.key.text, f.key.unit.value, f.value) for f in each] for each in found.rounds],
    }
    path = write_json("throughput", content)
    console.print(f"{path} and {plot_throughput(spreads(figures), results)}; {duration_s:.0f} s")


def _entry(what: str, unit: Unit, spread: Spread) -> dict[str, Any]:
    return {"what": what, "unit": unit.value, "spread": spread}


if __name__ == "__main__":
    main()
