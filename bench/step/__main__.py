"""`make bench CASE=step`: the host's milliseconds of a pass, engine steps against `BatchGenerator.next()`.

Each way of attending and mlx-lm's engine are processes of their own that take turns over the same numbers of
rows; a model of 36 layers and 64 hidden numbers leaves the device little to do. Counted is the CPU time of
the thread that builds passes (planning and publishing are in it), so that waiting for the device or for other
processes is not. On a CPU the graphs are a GPU's (`stand_ins`), on a GPU they are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.random_model import RandomModel, make_random_model
from bench.replies import quantile
from bench.report import OUT, console, setting, show_table, write_json
from bench.server_process import ROOT, child_environment
from bench.step.worker import ENGINE

ATTENTIONS = ("auto", "rows")
MOST_OF_ENGINE = {1: 1.1, 4: 1.0, 16: 0.9, 64: 0.8}
"""What a pass's host time should be at most, of mlx-lm's, by rows."""
MOST_GROWTH = 1.05
"""Of the primitives of a pass, from the fewest rows to the most."""
_USUAL_SHARE = 0.1
"""The quantile that is told: others' work on the cores makes passes longer, and never shorter."""
_WAIT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One side at one number of rows. Seconds of a pass, over all rounds."""

    side: str
    row_count: int
    cpu_s: tuple[float, ...]
    evaluation_s: tuple[float, ...]
    """The part of it in MLX's evaluation, which encodes the graph for the device."""
    primitive_count: int

    @property
    def usual_s(self) -> float:
        return quantile(self.cpu_s, _USUAL_SHARE)


class Side:
    """A process that measures one side when it is asked to."""

    def __init__(self, name: str, path: Path, *, log_file: Path) -> None:
        self.name = name
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.step.worker", name, str(path)],
                cwd=ROOT,
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._log_file = log_file
        self.device = ""

    def wait_until_ready(self) -> None:
        self.device = self._hear()["device"]

    def measure(self, row_count: int, *, prompt_token_count: int, pass_count: int) -> Found:
        """Let so many rows decode for so many passes."""
        assert self._process.stdin is not None
        order = {"rows": row_count, "prompt": prompt_token_count, "passes": pass_count}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        told = self._hear()
        return Found(
            self.name, row_count, tuple(told["cpu_s"]), tuple(told["evaluation_s"]), told["primitives"]
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(_WAIT_S, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(f"{self.name} ended, or took more than {_WAIT_S:g} s; see {self._log_file}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Measure, print the table, write bench/out/step.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=step", description=__doc__)
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=ATTENTIONS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prompt", type=int, default=40, help="tokens of each prompt")
    parser.add_argument("--passes", type=int, default=30, help="that are timed, of each side in each round")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "step.log"
    log_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        path = make_random_model(Path(scratch), which=RandomModel.DEEP)
        with _sides([*arguments.attention, ENGINE], path, log_file=log_file) as sides:
            device = sides[0].device
            found = list(_measured(sides, arguments))
    _report(joined(found), device=device)


def _measured(sides: Sequence[Side], arguments: argparse.Namespace) -> Iterator[Found]:
    """Have the sides take turns, and tell each measurement as it comes."""
    for row_count in arguments.rows:
        for _ in range(arguments.rounds):
            for side in sides:
                one = side.measure(
                    row_count, prompt_token_count=arguments.prompt, pass_count=arguments.passes
                )
                console.print(f"{row_count} rows, {side.name}: {1000 * one.usual_s:.2f} ms")
                yield one


@contextlib.contextmanager
def _sides(names: Sequence[str], path: Path, *, log_file: Path) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        for name in names:
            sides.append(Side(name, path, log_file=log_file))
        for side in sides:
            side.wait_until_ready()
        yield sides
    finally:
        for side in sides:
            side.end()


def joined(rounds: Sequence[Found]) -> list[Found]:
    """Return the passes of each side and number of rows together; of primitives the most."""
    together: dict[tuple[str, int], Found] = {}
    for one in rounds:
        key = (one.side, one.row_count)
        known = together.get(key)
        together[key] = (
            one
            if known is None
            else dataclasses.replace(
                known,
                cpu_s=known.cpu_s + one.cpu_s,
                evaluation_s=known.evaluation_s + one.evaluation_s,
                primitive_count=max(known.primitive_count, one.primitive_count),
            )
        )
    return list(together.values())


def growth(found: Sequence[Found], side: str) -> float:
    """Return the primitives of a pass with the most rows, of those with the fewest."""
    own = sorted((one for one in found if one.side == side), key=lambda one: one.row_count)
    return own[-1].primitive_count / own[0].primitive_count


def _report(found: Sequence[Found], *, device: str) -> None:
    engine = {one.row_count: one.usual_s for one in found if one.side == ENGINE}
    rows = []
    for one in found:
        usual_ms, evaluation_ms = 1000 * one.usual_s, 1000 * quantile(one.evaluation_s, _USUAL_SHARE)
        ratio = one.usual_s / engine[one.row_count]
        most = MOST_OF_ENGINE.get(one.row_count)
        is_judged = one.side != ENGINE and most is not None
        rows.append(
            (
                f"{one.row_count} rows, {one.side}",
                f"{usual_ms:.2f}",
                f"{1000 * quantile(one.cpu_s, 0.5):.2f}",
                f"{usual_ms - evaluation_ms:.2f}",
                f"{evaluation_ms:.2f}",
                f"{ratio:.2f}",
                f"<= {most}" if is_judged else "",
                ("met" if ratio <= most else "MISSED") if is_judged and most is not None else "",
                f"{one.primitive_count:,}",
            )
        )
    show_table(
        "Host time of a pass, ms of the thread's CPU time",
        ("", "p10", "p50", "building", "evaluation", "of mlx-lm's", "wanted", "", "primitives"),
        rows,
    )
    for side in dict.fromkeys(one.side for one in found):
        console.print(f"primitives from the fewest rows to the most, {side}: {growth(found, side):.2f}")
    console.print(f"{device}; wanted of pages at most {MOST_GROWTH}")
    console.print(str(write_json("step", {"setting": setting(), "device": device, "found": found})))


if __name__ == "__main__":
    main()
