"""`make bench CASE=models`: several models in one server, against one model alone.

How long a conversation waits for its model to come back, what loading does to another model's tokens, what a
pool of one costs, and fifty callers at random on three models (`bench.models.drive`).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.model_folder import model_path
from bench.models.beside import beside_verdicts, measure_beside, show_beside
from bench.models.drive import drive, show_drive
from bench.models.one import measure_one, one_verdicts, show_one
from bench.models.swap import measure_swaps, show_swaps, swap_verdicts
from bench.report import OUT, Verdict, console, setting, show_verdicts, write_json

PARTS = ("swap", "beside", "one", "drive")


def main() -> None:
    """Measure, print the tables, write bench/out/models.json; exit 1 where the drive found a fault."""
    parser = argparse.ArgumentParser(prog="make bench CASE=models", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--models", nargs=2, default=("medium", "medium-qwen"), help="random ones, or as for icehouse serve"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the drive")
    parser.add_argument("--seed", type=int, default=1, help="of the drive's callers")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "models.log"
    log_file.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        is_good = asyncio.run(_measure(arguments, Path(scratch), log_file))
    console.print(f"{time.monotonic() - began:.0f} s in all")
    raise SystemExit(0 if is_good else 1)


async def _measure(arguments: argparse.Namespace, scratch: Path, log_file: Path) -> bool:
    found: dict[str, Any] = {}
    verdicts: list[Verdict] = []
    is_good = True
    folders = []
    if set(arguments.parts) - {"drive"}:
        folders = [model_path(model, scratch) for model in arguments.models]
    rounds = arguments.rounds
    if "swap" in arguments.parts:
        found["swap"] = await measure_swaps(folders, _own(scratch, "swap"), log_file, round_count=rounds)
        show_swaps(found["swap"])
        verdicts += swap_verdicts(found["swap"])
    if "beside" in arguments.parts:
        found["beside"] = await measure_beside(folders, _own(scratch, "beside"), log_file, round_count=rounds)
        show_beside(found["beside"])
        verdicts += beside_verdicts(found["beside"])
    if "one" in arguments.parts:
        found["one"] = await measure_one(folders[0], _own(scratch, "one"), log_file, round_count=rounds)
        show_one(found["one"])
        verdicts += one_verdicts(found["one"])
    if "drive" in arguments.parts:
        tally = await drive(
            _own(scratch, "drive"), log_file, duration_s=arguments.seconds, seed=arguments.seed
        )
        found["drive"], is_good = tally, tally.is_good
        show_drive(tally)
    if verdicts:
        show_verdicts(verdicts)
    console.print(str(write_json("models", {"setting": setting(), **found, "targets": verdicts})))
    return is_good


def _own(scratch: Path, part: str) -> Path:
    folder = scratch / part
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
