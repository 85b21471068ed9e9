"""`make bench CASE=startup`: from the start of the process until the health service says SERVING.

The wall clock of `icehouse serve` with a tiny model, or with `--model`, and of a baseline command beside it
when one is named (`--baseline "/old/.venv/bin/icehouse"`): rounds alternate, so that a slow minute hits both.
CPU time is that of the whole life of the process and of those that it started, and what else runs changes it
less. Each server has a fresh cache directory, and one round of each side is not counted: it fills the
system's file cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import (
    OUT,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.server_process import child_environment, free_port, wait_until_serving
from tests.fixtures.models.folder import tiny_model_dir

TARGET = 0.6
"""Largest share of the baseline's time."""
_BOOT_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_OWN, _BASELINE = "this tree", "baseline"


@dataclasses.dataclass(frozen=True, slots=True)
class Boot:
    """One start: seconds until it served, and seconds of CPU until it had ended."""

    wall_s: float
    cpu_s: float


def main() -> None:
    """Measure, print the table, write bench/out/startup.json; exit with 1 when the target is missed."""
    parser = argparse.ArgumentParser(prog="make bench CASE=startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of each side")
    parser.add_argument("--architecture", default="llama", help="of the model zoo in tests/fixtures/models")
    parser.add_argument("--model", help="a model folder, instead of a tiny one")
    parser.add_argument("--baseline", help="the command to compare with, up to and without `serve`")
    parser.add_argument("--flags", default="", help="further flags of `serve`, for both sides")
    arguments = parser.parse_args()
    sides = {_OWN: [sys.executable, "-m", "icehouse_server.cli.main"]}
    if arguments.baseline:
        sides[_BASELINE] = shlex.split(arguments.baseline)
    times = _measure(
        sides,
        round_count=arguments.rounds,
        architecture=arguments.architecture,
        named=arguments.model,
        flags=shlex.split(arguments.flags),
    )
    sys.exit(0 if _report(times) else 1)


def _measure(
    sides: Mapping[str, Sequence[str]],
    *,
    round_count: int,
    architecture: str,
    named: str | None,
    flags: Sequence[str],
) -> dict[str, list[Boot]]:
    OUT.mkdir(parents=True, exist_ok=True)
    times: dict[str, list[Boot]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        model = tiny_model_dir(Path(scratch), architecture) if named is None else Path(named).absolute()
        for round_index in range(round_count + 1):
            # The second side finds the machine in the state that the first left, so the order alternates.
            for side in sorted(sides, reverse=bool(round_index % 2)):
                blocks = Path(scratch) / f"blocks-{round_index}-{side.split()[0]}"
                port = free_port()
                command = [*sides[side], "serve", "--port", str(port), "--model", str(model)]
                command += ["--cache-directory", str(blocks), *flags]
                # Children run in a separate folder, so that neither side imports the other's tree.
                environment = child_environment() if side == _OWN else os.environ
                boot = _boot(command, port=port, folder=Path(scratch), environment=environment)
                if round_index:
                    times[side].append(boot)
    return times


def _boot(command: Sequence[str], *, port: int, folder: Path, environment: Mapping[str, str]) -> Boot:
    """Start a server, stop it once it serves, and return the times."""
    used_s = _cpu_of_children_s()
    with (OUT / "startup.log").open("ab") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = began + _BOOT_TIMEOUT_S
            wait_until_serving(process, port, deadline=deadline, log_file=OUT / "startup.log")
            wall_s = time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_TIMEOUT_S)
    return Boot(wall_s, _cpu_of_children_s() - used_s)


def _cpu_of_children_s() -> float:
    """Return the CPU time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _report(times: Mapping[str, Sequence[Boot]]) -> bool:
    walls = {side: [boot.wall_s for boot in boots] for side, boots in times.items()}
    cpus = {side: [boot.cpu_s for boot in boots] for side, boots in times.items()}
    for title, seconds in (("Process start to SERVING, s", walls), ("CPU time, stop included, s", cpus)):
        spreads = {side: spread_of(values) for side, values in seconds.items()}
        show_table(
            title,
            ("side", "median (min to max)", "quartiles"),
            ((side, s.text(), f"{s.low_quartile:.2f}, {s.high_quartile:.2f}") for side, s in spreads.items()),
        )
    is_met = True
    found: dict[str, Any] = {"setting": setting(), "boot_s": walls, "cpu_s": cpus}
    if _BASELINE in times:
        ratio = ratios(walls[_OWN], walls[_BASELINE])
        found["ratio"] = ratio
        verdict = Verdict("start, this tree over the baseline", ratio, TARGET, at_least=False)
        show_verdicts([verdict])
        is_met = verdict.is_met
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    write_json("startup", found)
    return is_met


if __name__ == "__main__":
    main()
