"""`make bench CASE=vision`: a conversation about one picture, and what new pictures do to others' decode.

TTFT cold, from RAM, of the next turn, and from SSD after a restart, beside mlx-vlm's own server at its
defaults and with its prefix cache on: 256 image tokens and some 700 of text, of a random Qwen2.5-VL. Then
p99 between two tokens of one stream and of four while new pictures come one after another. Ratios of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import (
    OUT,
    Spread,
    Verdict,
    console,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.vision_beside import (
    FULL,
    GAP_LIMIT,
    QUICK,
    STREAM_COUNTS,
    BesideSizes,
    Gaps,
    gap_name,
    gap_ratios,
    gap_seconds,
    measure_beside,
)
from bench.vision_model import make_vision_model
from bench.vision_ttft import ICEHOUSE, Talk, measure_talks, talk_ratios

PARTS = ("ttft", "beside")


def main() -> None:
    """Measure, print the tables, write bench/out/vision.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=vision", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of each, and a short one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--beside", action="store_true", help="the same as --parts beside")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    parts = ("beside",) if arguments.beside else arguments.parts
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "vision.log"
    log_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        asyncio.run(_measure(Path(scratch), log_file, rounds, parts, QUICK if arguments.quick else FULL))
    console.print(f"{time.monotonic() - began:.0f} s in all")


async def _measure(
    scratch: Path, log_file: Path, round_count: int, parts: Sequence[str], sizes: BesideSizes
) -> None:
    model = await asyncio.to_thread(make_vision_model, scratch)
    talks: list[Talk] = []
    gaps: list[Gaps] = []
    if "ttft" in parts:
        talks = await measure_talks(model, scratch, log_file, round_count)
    if "beside" in parts:
        gaps = await measure_beside(model, scratch, log_file, round_count, sizes)
    _report(talks, gaps)


def _report(talks: Sequence[Talk], gaps: Sequence[Gaps]) -> None:
    verdicts: list[Verdict] = []
    content: dict[str, Any] = {"setting": setting()}
    if talks:
        found = talk_ratios(talks)
        _show_talks(talks, found)
        content |= {"ttft_ratios": found, "talks": [_plain(talk) for talk in talks]}
        verdicts += [
            Verdict("RAM hit / cold", found[f"{ICEHOUSE}: again / cold"], 0.05, False),
            Verdict("SSD hit / cold", found[f"{ICEHOUSE}: after a restart / cold"], 0.08, False),
        ]
    if gaps:
        beside = gap_ratios(gaps)
        _show_gaps(gaps, beside)
        content |= {"gap_ratios": beside, "gaps": gaps}
        names = [gap_name(count) for count in STREAM_COUNTS]
        verdicts += [Verdict(name, beside[name], GAP_LIMIT, False) for name in names]
    show_verdicts(verdicts)
    console.print(str(write_json("vision", {**content, "targets": verdicts})))


def _show_talks(talks: Sequence[Talk], found: dict[str, Spread]) -> None:
    show_table(
        f"TTFT, {talks[0].image_tokens} image tokens of {talks[0].prompt_tokens}, ratios picture by picture",
        ("compared", "median (min to max)"),
        ((name, spread.text(3)) for name, spread in found.items()),
    )
    sides = list(talks[0].times)
    names = ("cold_s", "again_s", "next_turn_s", "restarted_s")
    show_table(
        "For orientation, this machine and moment only: TTFT in ms",
        ("side", *(name.removesuffix("_s").replace("_", " ") for name in names)),
        ((side, *(_milliseconds(talks, side, name) for name in names)) for side in sides),
    )
    for side in sides:
        kept = [talk.times[side] for talk in talks]
        console.print(
            f"{side} said that it reused {min(t.again_tokens for t in kept)} tokens or more of the same "
            f"prompt, {min(t.restarted_tokens for t in kept)} or more after the restart"
        )
    equal_count = sum(talk.replies_are_equal for talk in talks)
    console.print(f"icehouse's replies cold, from RAM and from SSD equal: {equal_count} of {len(talks)}")


def _milliseconds(talks: Sequence[Talk], side: str, name: str) -> str:
    return f"{1000 * spread_of(getattr(talk.times[side], name) for talk in talks).median:.0f}"


def _show_gaps(gaps: Sequence[Gaps], found: dict[str, Spread]) -> None:
    show_table(
        "Between two tokens beside new pictures, ratios round by round",
        ("compared", "median (min to max)"),
        ((name, spread.text(2)) for name, spread in found.items()),
    )
    rows = ((name, f"{1000 * spread.median:.1f}") for name, spread in gap_seconds(gaps).items())
    show_table("For orientation, this machine and moment only", ("streams", "ms"), rows)
    console.print(f"gaps beside pictures in a round: {min(each.beside_count for each in gaps)} or more")


def _plain(talk: Talk) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(talk).items() if name != "picture"}


if __name__ == "__main__":
    main()
