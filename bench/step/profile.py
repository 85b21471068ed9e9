"""`make bench CASE=profile`: where one step's time goes on the inference thread of a real engine.

The engine is composed as `icehouse serve` composes it, in this process and without the edge; its rows decode
greedily. First the steps run as they are, and only what MLX computes is timed: the rest is the host's. Then
as many run under cProfile, whose times go to the room of the code that spent them, builtins to their
callers. The profiler slows Python down and not the device: take its host shares, not its seconds. Reading an
array that was not evaluated computes it: that time is with the code that reads.

It knows of the engine only `EngineLoop.step`, `Engine.submit` and the names of the rooms: lanes or one pass.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import dataclasses
import pstats
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from icehouse_server.bootstrap.imports.openblas import load_openblas

from bench.replies import quantile
from bench.report import console, setting, show_table, write_json

PLANNING, GRAPH, DEVICE = "planning", "graph building", "device"
SAMPLING, PUBLISHING, CACHE, LOOP, OTHER = "sampling", "publishing", "prefix cache", "loop", "other"
_PHASES = (
    ("icehouse_server/engine/scheduling/", PLANNING),
    ("icehouse_server/engine/prefix_cache/", CACHE),
    ("icehouse_server/engine/sampling/", SAMPLING),
    ("icehouse_server/engine/output.py", PUBLISHING),
    ("icehouse_server/engine/", GRAPH),
    ("icehouse_server/text/", PUBLISHING),
    ("icehouse_server/rpc/", PUBLISHING),
    ("icehouse_server/bootstrap/server.py", PUBLISHING),
    ("asyncio/", PUBLISHING),
    ("mlx_lm/", GRAPH),
    ("mlx/", GRAPH),
    ("bench/step/profile.py", DEVICE),
)
"""Part of a file's path -> phase, the first that fits. The device is the wrapper around MLX's evaluation."""
_LOOP_FILES = re.compile(r"icehouse_server/engine/((engine_loop|requests|engine|stats)\.py|core/)")
_EVALUATIONS = ("eval", "async_eval", "synchronize")
_TOP_COUNT = 15


@dataclasses.dataclass(slots=True)
class Watch:
    """What is noted on the inference thread while steps are watched. One thread writes at a time."""

    wanted_count: int = 0
    """Steps still to be watched; set by the main thread, counted down by the inference thread."""
    profile: cProfile.Profile | None = None
    steps_s: list[float] = dataclasses.field(default_factory=list)
    device_s: float = 0.0
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def begin(self, count: int, *, profile: cProfile.Profile | None) -> None:
        """Watch the next `count` steps."""
        self.profile = profile
        self.steps_s, self.device_s = [], 0.0
        self.done.clear()
        self.wanted_count = count

    def step(self, run: Callable[[], None]) -> None:
        """Run one step, watched if it is wanted."""
        if not self.wanted_count:
            run()
            return
        began = time.perf_counter()
        if self.profile is not None:
            self.profile.runcall(run)
        else:
            run()
        self.steps_s.append(time.perf_counter() - began)
        self.wanted_count -= 1
        if not self.wanted_count:
            self.done.set()

    def evaluation(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return MLX's `run`, timed while steps are watched."""

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*arguments, **options)
            finally:
                if self.wanted_count:
                    self.device_s += time.perf_counter() - began

        return timed


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Steps as they are, and the same under the profiler."""

    steps_s: list[float]
    device_s: float
    profiled_steps_s: list[float]
    profile: cProfile.Profile


def main() -> None:
    """Measure, print the tables, write bench/out/profile.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=profile", description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="sequences that decode")
    parser.add_argument("--prompt", type=int, default=40, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60, help="steps that are watched, twice")
    parser.add_argument("--model", default="thin", help="thin, large, deep, or as for icehouse serve")
    parser.add_argument("--attention", default="auto", help="as for icehouse serve")
    parser.add_argument("--as-gpu", action="store_true", help="with a GPU's graphs stood in for, on a CPU")
    arguments = parser.parse_args()
    load_openblas()
    if arguments.as_gpu:
        from bench.step.stand_ins import take_gpu_ways

        take_gpu_ways()
    # Only now: these import MLX, in front of which OpenBLAS belongs.
    from bench.model_folder import model_path

    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        path = model_path(arguments.model, Path(scratch))
        found = asyncio.run(_measure(path, arguments))
    _report(found, arguments)


async def _measure(path: Path, arguments: argparse.Namespace) -> Measured:
    """Let the rows decode on the engine's own thread and watch its steps."""
    import mlx.core as mx
    from icehouse_server.device import find_device
    from icehouse_server.engine.engine_loop import EngineLoop

    from bench.step.engine import running_engine, until
    from bench.step.stand_ins import GPU, have_one_primitive_each, have_page_kernels

    if arguments.as_gpu:
        have_page_kernels()
    device = GPU if arguments.as_gpu else find_device()
    watch = Watch()
    own_step = EngineLoop.step

    def watched_step(self: EngineLoop) -> None:
        watch.step(lambda: own_step(self))

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(EngineLoop, "step", watched_step))
        for name in _EVALUATIONS:
            patches.enter_context(patch.object(mx, name, watch.evaluation(getattr(mx, name))))
        flags = {"engine.attention": arguments.attention}
        async with running_engine(path, device=device, flags=flags) as engine:
            if arguments.as_gpu:
                have_one_primitive_each()
            rows = engine.rows(
                arguments.rows, prompt_token_count=arguments.prompt, output_limit=100 * arguments.steps
            )
            async with rows:
                watch.begin(arguments.steps, profile=None)
                await until(watch.done.is_set)
                steps_s, device_s = watch.steps_s, watch.device_s
                profile = cProfile.Profile()
                watch.begin(arguments.steps, profile=profile)
                await until(watch.done.is_set)
                return Measured(steps_s, device_s, watch.steps_s, profile)


def phase_of(file: str) -> str:
    """Return the phase of a step that code of this file belongs to."""
    path = Path(file).as_posix()
    if _LOOP_FILES.search(path):
        return LOOP
    return next((phase for part, phase in _PHASES if part in path), OTHER)


def seconds_by_phase(entries: Mapping[tuple[str, int, str], tuple[Any, ...]]) -> Counter[str]:
    """Return the own time of a profile's functions by phase; `entries` are as `pstats.Stats.stats` has them.

    What a builtin took goes to whoever called it, each caller its part.
    """
    found: Counter[str] = Counter()
    for (file, _, _), (_, _, own_s, _, callers) in entries.items():
        if file != "~" or not callers:
            found[phase_of(file)] += own_s
            continue
        for (caller_file, _, _), (_, _, part_s, _) in callers.items():
            found[phase_of(caller_file)] += part_s
    return found


def _report(found: Measured, arguments: argparse.Namespace) -> None:
    count = len(found.steps_s)
    step_s, device_s = sum(found.steps_s) / count, found.device_s / count
    p50_s, p99_s = quantile(found.steps_s, 0.5), quantile(found.steps_s, 0.99)
    stats = pstats.Stats(found.profile)
    entries: dict[tuple[str, int, str], tuple[Any, ...]] = stats.stats  # type: ignore[attr-defined]
    profiled_count = len(found.profiled_steps_s)
    phases = {phase: seconds / profiled_count for phase, seconds in seconds_by_phase(entries).most_common()}
    host_s = sum(seconds for phase, seconds in phases.items() if phase != DEVICE)
    console.print(
        f"{arguments.rows} rows, {count} steps: {1000 * step_s:.2f} ms a step (p50 {1000 * p50_s:.2f}, p99 "
        f"{1000 * p99_s:.2f}), of which {1000 * device_s:.2f} ms MLX computes and "
        f"{1000 * (step_s - device_s):.2f} ms are the host's; "
        f"under the profiler {1000 * sum(found.profiled_steps_s) / profiled_count:.2f} ms"
    )
    show_table(
        "Under the profiler, ms a step",
        ("phase", "ms", "share of the host's"),
        (
            (phase, f"{1000 * seconds:.3f}", "-" if phase == DEVICE else f"{100 * seconds / host_s:.0f} %")
            for phase, seconds in phases.items()
        ),
    )
    dearest = sorted(entries.items(), key=lambda entry: entry[1][2], reverse=True)[:_TOP_COUNT]
    functions = [
        {
            "function": f"{'/'.join(Path(file).parts[-3:])}:{line} {name}" if file != "~" else name,
            "calls": call_count / profiled_count,
            "ms": 1000 * own_s / profiled_count,
        }
        for (file, line, name), (_, call_count, own_s, _, _) in dearest
    ]
    show_table(
        "Functions with most time of their own, a step",
        ("function", "calls", "ms"),
        ((str(f["function"]), f"{f['calls']:.0f}", f"{f['ms']:.3f}") for f in functions),
    )
    path = write_json(
        "profile",
        {
            "setting": setting(),
            "model": arguments.model,
            "rows": arguments.rows,
            "step_s": step_s,
            "step_p50_s": p50_s,
            "step_p99_s": p99_s,
            "device_s": device_s,
            "profiled_phases_s": phases,
            "functions": functions,
        },
    )
    console.print(str(path))


if __name__ == "__main__":
    main()
