"""`make bench CASE=cache`: what the prefix cache saves and what it costs, as ratios of one run.

TTFT cold, from RAM and from SSD after a restart, side by side with mlx-lm's own server; inter-token times
beside spilling and restoring neighbours; bytes on disk of conversations that share a prefix; how soon a turn
is on SSD, and how long a stop takes. The model has random weights and 128 KiB of KV per token
(bench.random_model).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cache_decode import DecodeTimes, measure_decode
from bench.cache_disk import DiskUse, measure_disk
from bench.cache_durable import Durability, durable_verdicts, measure_durable
from bench.cache_ttft import PromptTimes, measure_ttft, ttft_ratios, ttft_seconds
from bench.plots import plot_cache
from bench.random_model import KV_BYTES_PER_TOKEN, make_random_model
from bench.replies import quantile
from bench.report import (
    OUT,
    Spread,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)

PARTS = ("ttft", "decode", "disk", "durable")
PROMPT_TOKEN_COUNT = 1000


def main() -> None:
    """Measure, print the tables, write bench/out/cache.json and .png."""
    parser = argparse.ArgumentParser(prog="make bench CASE=cache", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, help="measured rounds")
    arguments = parser.parse_args()
    round_count = arguments.rounds or (1 if arguments.quick else 5)
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "cache.log"
    log_file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        asyncio.run(_measure(Path(scratch), log_file, round_count, arguments.parts))
    console.print(f"{time.monotonic() - began:.0f} s in all")


async def _measure(scratch: Path, log_file: Path, round_count: int, parts: Sequence[str]) -> None:
    model_path = make_random_model(scratch)
    prompts: list[PromptTimes] = []
    decode: list[DecodeTimes] = []
    disk: DiskUse | None = None
    if "ttft" in parts:
        prompts = await measure_ttft(
            model_path=model_path,
            scratch=scratch,
            log_file=log_file,
            round_count=round_count,
            token_count=PROMPT_TOKEN_COUNT,
        )
    if "decode" in parts:
        decode = await measure_decode(
            model_path=model_path,
            scratch=scratch,
            log_file=log_file,
            round_count=round_count,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        )
    if "disk" in parts:
        disk = await measure_disk(
            model_path=model_path,
            scratch=scratch,
            log_file=log_file,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        )
    durable: list[Durability] = []
    if "durable" in parts:
        durable = await measure_durable(scratch=scratch, log_file=log_file, round_count=round_count)
    _report(prompts, decode, disk, durable)


def _report(
    prompts: Sequence[PromptTimes],
    decode: Sequence[DecodeTimes],
    disk: DiskUse | None,
    durable: Sequence[Durability],
) -> None:
    found = ttft_ratios(prompts) if prompts else {}
    costs = _decode_ratios(decode) if decode else {}
    verdicts: list[Verdict] = []
    if prompts:
        _show_ttft(prompts, found)
        verdicts += [
            Verdict("RAM hit / cold", found["RAM hit / cold"], 0.05, False),
            Verdict("SSD hit / cold", found["SSD hit after restart / cold"], 0.08, False),
            Verdict("SSD hit / RAM hit", found["SSD hit / RAM hit behind it"], 1.5, False),
        ]
    if decode:
        rows = ((name, spread.text()) for name, spread in costs.items())
        show_table("Inter-token time of a neighbour", ("compared", "median (min to max)"), rows)
        verdicts += [
            Verdict(f"decode p99 of all rounds, {name}", costs[f"p99 of all rounds, {name}"], 1.1, False)
            for name in (
                "prefill and spill / prefill",
                "restore / idle",
                "SSD hit / RAM hit",
            )
        ]
    if disk is not None:
        verdicts.append(Verdict("disk bytes / unique KV", spread_of([disk.ratio]), 1.03, False))
    if durable:
        verdicts += durable_verdicts(durable)
    show_verdicts(verdicts)
    ratios_found = {"ttft_ratios": found, "decode_ratios": costs}
    content = {"setting": setting(), **ratios_found, "disk": disk, "durable": durable}
    path = write_json("cache", {**content, "targets": verdicts, "prompts": prompts, "decode": decode})
    console.print(str(path))
    if prompts:
        console.print(str(plot_cache(ttft_seconds(prompts), costs)))


def _show_ttft(prompts: Sequence[PromptTimes], found: dict[str, Spread]) -> None:
    show_table(
        f"TTFT of a prompt of {prompts[0].prompt_tokens} tokens, ratios prompt by prompt",
        ("compared", "median (min to max)"),
        ((name, spread.text(3)) for name, spread in found.items()),
    )
    show_table(
        "For orientation, this machine and moment only",
        ("TTFT", "ms"),
        ((name, f"{1000 * spread.median:.0f}") for name, spread in ttft_seconds(prompts).items()),
    )
    console.print(
        f"reused: {min(p.ram_tokens for p in prompts)} tokens or more from RAM, "
        f"{min(p.ssd_tokens for p in prompts)} or more from SSD; cold, RAM and SSD replies equal: "
        f"{sum(p.replies_are_equal for p in prompts)} of {len(prompts)}"
    )


def _decode_ratios(decode: Sequence[DecodeTimes]) -> dict[str, Spread]:
    def of(neighbour: str, name: str) -> list[float | None]:
        return [getattr(times, name) for times in decode if times.neighbour == neighbour]

    pairs = (
        ("prefill", "idle"),
        ("prefill and spill", "prefill"),
        ("restore", "idle"),
        ("raw read", "idle"),
        ("restore", "raw read"),
        ("SSD hit", "RAM hit"),
    )

    def pooled_p99_s(neighbour: str) -> float:
        return quantile(
            [gap for times in decode if times.neighbour == neighbour for gap in times.gaps_s], 0.99
        )

    found = {
        f"{label}, {above} / {below}": ratios(of(above, name), of(below, name))
        for label, name in (("p50", "p50_s"), ("p99", "p99_s"))
        for above, below in pairs
    }
    # The p99 of one round is its third longest gap: on a busy machine that of all rounds together says more.
    return found | {
        f"p99 of all rounds, {above} / {below}": spread_of([pooled_p99_s(above) / pooled_p99_s(below)])
        for above, below in pairs
    }


if __name__ == "__main__":
    main()
