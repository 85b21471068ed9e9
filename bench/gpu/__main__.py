"""`make bench CASE=gpu`: what callers wait for on a GPU, server against mlx-lm's batch engine in process.

A model of a real shape is made on the spot with random weights; nothing is fetched. Each case runs in rounds,
which begin with the one side and the other in turn; the most important case comes first, and figures are
printed as they come. Ratios are taken within a round. At the end comes the table of targets, which are those
of an H100 or H200 with the shape of Qwen3-4B. `--shape tiny --scale 0.05` shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from icehouse_server.bootstrap.imports.openblas import find_openblas, runs_on_cpu

from bench.cases.figure import Figure, FigureKey, Unit, spreads
from bench.cases.target import judge, show_results
from bench.engine_process import EngineProcess
from bench.gpu.cases import BURSTS, ENGINE_SIZES, LOAD_S, ORDER, OTHERS, PASS_MS, Setup, Sides
from bench.gpu.exact import LENGTHS, measure_exactness
from bench.gpu.passes import describe, read_passes
from bench.gpu.shapes import SHAPES, make_shape
from bench.gpu.targets import targets
from bench.report import OUT, console, setting, write_json
from bench.server_process import child_environment

EXACT_CASE = "exact"
CASES = (*ORDER, EXACT_CASE)
_ONCE = ("restart", "ram2000", "ram16000")
"""Cases that one round of is enough: they repeat what they measure, or take long."""
_SEED = 1
_DIGITS = {Unit.TOKENS_PER_S: 0, Unit.TOKENS: 0, Unit.SECONDS: 1, Unit.RATIO: 2}
_EXACT_SHAPES = {"tiny": "tiny"}
_EXACT_SHAPE = "qwen3-06b"
_EXACT_LENGTH_LIMIT = 1000
"""Of prompts, where the scale says that this is a look only."""


@dataclasses.dataclass(slots=True)
class Run:
    """What is measured, until when, and what came of it so far."""

    round_count: int
    end_time: float
    shows_passes: bool
    device: str = "unknown"
    """Its name, told by MLX in the engine's process."""
    figures: list[Figure] = dataclasses.field(default_factory=list)

    @property
    def has_time(self) -> bool:
        """Whether another round may begin."""
        return time.monotonic() < self.end_time


def main() -> None:
    """Measure, print the table, write bench/out/gpu.json."""
    arguments = _arguments()
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "gpu.log"
    log_file.unlink(missing_ok=True)
    began = time.monotonic()
    run = Run(arguments.rounds, began + 60 * arguments.minutes, arguments.passes)
    gc.collect()
    gc.freeze()  # no full collection between two tokens
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-", dir=arguments.scratch) as scratch:
        setup = _setup(arguments, Path(scratch), log_file)
        cases = [case for case in arguments.cases if case != EXACT_CASE]
        try:
            if cases:
                _compare(setup, cases, run, arguments)
            if EXACT_CASE in arguments.cases and run.has_time:
                _compare_replies(arguments, Path(scratch), run, log_file)
        finally:
            # A run that breaks off has measured something too.
            if run.figures:
                _report(run, arguments, duration_s=time.monotonic() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench CASE=gpu", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b", help="whose shape the model has")
    parser.add_argument("--dtype", default="bfloat16", help="type of its weights")
    parser.add_argument("--models", type=Path, help="folder in which models are kept for the next run")
    parser.add_argument("--scratch", type=Path, help="folder for the cache, instead of the system's")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what to measure, in order")
    parser.add_argument("--rounds", type=int, default=3, help="of each case")
    parser.add_argument("--minutes", type=float, default=15.0, help="no round begins later than this")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths but the short prompts'")
    parser.add_argument("--no-warm-up", action="store_true", help="measure what a first burst meets")
    parser.add_argument("--passes", action="store_true", help="tell what the server's passes were")
    parser.add_argument("--serve-flags", default="", help="more flags for icehouse serve, in one string")
    parser.add_argument(
        "--profile-with",
        default="",
        help="a command, run with the server's process id behind it while the first case repeats",
    )
    return parser.parse_args()


def _setup(arguments: argparse.Namespace, scratch: Path, log_file: Path) -> Setup:
    models = arguments.models or scratch
    began = time.monotonic()
    path = make_shape(models, arguments.shape, dtype=arguments.dtype)
    console.print(f"{path.name}: there after {time.monotonic() - began:.1f} s")
    return Setup(
        model_path=path,
        vocabulary_size=SHAPES[arguments.shape]["vocab_size"],
        # What the server takes there: weights in float32 where there is OpenBLAS, else the model's own.
        dtype="float32" if runs_on_cpu() and find_openblas() else "",
        scratch=scratch,
        log_file=log_file,
        flags=(*_memory_flags(), *shlex.split(arguments.serve_flags)),
        scale=arguments.scale,
    )


def _memory_flags() -> tuple[str, ...]:
    """Return flags that leave more than half of a GPU to the engine beside the server: for 16,000 tokens half
    of 80 GB was too little. Asked in a process of its own, since who asks holds memory there."""
    asks = (
        "from icehouse_server.device import find_device; device = find_device(); "
        "print(device.is_gpu * (device.memory_bytes or 0))"
    )
    told = subprocess.run(
        [sys.executable, "-c", asks], env=child_environment(), check=True, capture_output=True, text=True
    )
    memory_bytes = int(told.stdout)
    return ("--memory-limit-bytes", str(2 * memory_bytes // 5)) if memory_bytes else ()


def _compare(setup: Setup, cases: Sequence[str], run: Run, arguments: argparse.Namespace) -> None:
    """Measure all cases but that of equal replies."""
    engine = EngineProcess(
        model_path=setup.model_path,
        dtype=setup.dtype,
        log_file=setup.log_file,
        sizes=ENGINE_SIZES,
        ignores_end_tokens=True,
    )
    with engine:
        run.device = engine.device
        sides = Sides(setup, engine, seed=_SEED)
        with sides.opened():
            console.print(f"{engine.device}: first start to SERVING {sides.server.boot_s:.1f} s")
            for case in cases:
                if not run.has_time:
                    console.print(f"no time for {case}")
                    continue
                if case in BURSTS and not arguments.no_warm_up:
                    sides.warm_up(BURSTS[case])
                _measure_case(sides, case, run)
            if arguments.profile_with:
                _profile(sides, cases[0], shlex.split(arguments.profile_with))


def _measure_case(sides: Sides, case: str, run: Run) -> None:
    """Run a case's rounds, keep its figures and print their medians."""
    found: list[Figure] = []
    rounds = 1 if case in _ONCE else run.round_count
    began = time.perf_counter()
    for index in range(rounds):
        if index and not run.has_time:
            break
        if case in BURSTS:
            found += sides.burst(BURSTS[case], server_first=bool(index % 2))
        else:
            found += OTHERS[case](sides)
    run.figures += found
    _say(*lines_of(found))
    if run.shows_passes:
        passes = read_passes(sides.passes_file, since_s=began, until_s=time.perf_counter())
        _say(*(f"    {line}" for line in describe(passes)))


def _say(*lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def lines_of(figures: Sequence[Figure]) -> list[str]:
    """Return one line for each case, with each figure's median and spread."""
    by_case: dict[str, list[str]] = {}
    for key, spread in spreads(figures).items():
        digits = _DIGITS[key.unit]
        value = spread.text(digits) if spread.count > 1 else spread.number(digits)
        by_case.setdefault(key.case, []).append(f"{key.name} {value}")
    return [f"{case}: {'; '.join(parts)}" for case, parts in by_case.items()]


def _profile(sides: Sides, case: str, command: Sequence[str]) -> None:
    """Repeat a burst on the server alone for as long as a profiler watches it."""
    burst = BURSTS[case]
    profiler = subprocess.Popen([*command, str(sides.server.process_id)])
    try:
        while profiler.poll() is None:
            prompts = sides.prompts.take_each(sides.setup.scaled(n) for n in burst.prompt_token_counts)
            sides.callers.ask(prompts, max_output_tokens=burst.output_token_count)
    finally:
        profiler.kill()
        profiler.wait()


def _compare_replies(arguments: argparse.Namespace, scratch: Path, run: Run, log_file: Path) -> None:
    """Ask cold, from RAM and from SSD for replies that must be equal."""
    shape = _EXACT_SHAPES.get(arguments.shape, _EXACT_SHAPE)
    own = argparse.Namespace(**{**vars(arguments), "shape": shape, "dtype": "float32"})
    folder = scratch / EXACT_CASE
    folder.mkdir()
    setup = _setup(own, folder, log_file)
    lengths = [n for n in LENGTHS if arguments.scale >= 1.0 or n <= _EXACT_LENGTH_LIMIT]
    run.figures += measure_exactness(setup, lengths=lengths, on_judged=lambda judged: _say(judged.line))


def _report(run: Run, arguments: argparse.Namespace, *, duration_s: float) -> None:
    found = spreads(run.figures)

    def median(key: FigureKey) -> float:
        return found[key].median if key in found else math.nan

    results = judge(run.figures, targets(pass_ms=median(PASS_MS), load_s=median(LOAD_S)))
    show_results(results)
    facts = setting()
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    console.print(f"{run.device}; {arguments.shape} {arguments.dtype}; {versions}; {duration_s:.0f} s")
    if arguments.scale != 1.0:
        console.print(f"lengths are {arguments.scale:g} of those the targets are of")
    content = {
        "setting": facts,
        "device": run.device,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "duration_s": duration_s,
        "targets": [
            {"what": r.key.text, "must": r.target.must, "goal": r.target.goal, "result": r.grade.value}
            for r in results
        ],
        "figures": [
            {"case": key.case, "what": key.name, "unit": key.unit.value, **dataclasses.asdict(spread)}
            for key, spread in found.items()
        ],
    }
    console.print(str(write_json("gpu", content)))


if __name__ == "__main__":
    main()
