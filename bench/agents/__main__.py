"""`make bench CASE=agents`: agents' sessions replayed, from a public trace or generated.

Against a model of the tiers it compares rules of eviction and budgets of checkpoints with LRU and with
Belady's rule, which knows the future: a million requests in minutes. With --server it sends the requests to
`icehouse serve` instead, at any time scale, and measures hits by tier, first tokens, bytes written and read.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path

from bench.agents.checkpoints import Victim
from bench.agents.generator import Shape, generate
from bench.agents.live import Sending, replay_live
from bench.agents.readers import Arrangement, read_trace
from bench.agents.report import EVERYTHING, Findings, describe, report, report_live
from bench.agents.rules import Rule
from bench.agents.simulation import Outcome, Replay, budgets, limits_of
from bench.agents.trace import Trace, beside
from bench.model_folder import model_path
from bench.report import OUT, console

_KIB, _MIB = 1 << 10, 1 << 20
PARTS = ("blocks", "checkpoints")
_Found = dict[tuple[str, float], list[Outcome]]


def main() -> None:
    """Replay, print the tables, write bench/out/agents.json and .png, or agents-server.json."""
    arguments = _parser().parse_args()
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.server:
        _serve(arguments)
    else:
        _simulate(arguments)
    console.print(f"{time.monotonic() - began:.0f} s in all")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench CASE=agents", description=__doc__)
    add, usual = parser.add_argument, Arrangement()
    add("--trace", type=Path, nargs="+", help="files or folders of one format; generated without it")
    add("--beside", type=Path, nargs="+", help="a second tenant's trace, stretched over the same time")
    add("--requests", type=int, default=20_000, help="requests to generate, or to take of a trace")
    add("--shared", type=float, default=usual.shared, help="share of tools and instructions in common")
    add("--open", type=float, default=usual.open_count, help="sessions open at once, on average")
    add("--seed", type=int, default=usual.seed)
    add("--rounds", type=int, default=1, help="arrangements of the sessions, each from another seed")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--sizes", type=float, nargs="+", default=[0.025, 0.05, 0.1], help="of all different blocks")
    add("--ram-share", type=float, default=0.2, help="of a cache that is RAM")
    add("--budgets", type=int, nargs="+", default=[8, 4, 2], help="checkpoints that a session keeps")
    add("--state-tokens", type=int, default=2048, help="tokens whose KV takes as much as a checkpoint")
    add("--kv-kib", type=float, default=45, help="KiB of KV per token, for the bytes in the tables")
    add("--server", action="store_true", help="send the requests to a server")
    add("--minutes", type=float, default=5, help="with --server: no request begins later")
    add("--time-scale", type=float, default=20, help="with --server: seconds of the trace in one")
    add("--model", default="small", help="with --server: small, large, thin, or as for icehouse serve")
    add("--block-tokens", type=int, default=2, help="with --server: tokens for a block of the trace")
    add("--ram-mib", type=float, default=64, help="with --server: MiB of the RAM tier")
    add("--ssd-mib", type=float, default=256, help="with --server: MiB of the SSD tier")
    return parser


def _trace(arguments: argparse.Namespace, seed: int) -> Trace:
    if arguments.trace is None:
        shape = dataclasses.replace(Shape(), open_count=arguments.open)
        return generate(arguments.requests, shape, seed=seed)
    arrangement = Arrangement(shared=arguments.shared, open_count=arguments.open, seed=seed)
    found = read_trace(arguments.trace, arrangement)
    if arguments.beside is not None:
        found = beside(found, read_trace(arguments.beside, arrangement))
    return dataclasses.replace(found, requests=found.requests[: arguments.requests])


def _simulate(arguments: argparse.Namespace) -> None:
    blocks: _Found = {}
    checkpoints: _Found = {}
    trace = None
    for number in range(arguments.rounds):
        trace = _trace(arguments, arguments.seed + number)
        replay = Replay(trace)
        if number == 0:
            console.print(describe(trace, block_count=replay.paths.block_count), highlight=False)
        if "blocks" in arguments.parts:
            _play_blocks(replay, arguments, blocks)
        if "checkpoints" in arguments.parts:
            _play_checkpoints(replay, arguments, checkpoints)
    assert trace is not None, "--rounds is at least 1"
    report(
        Findings(
            trace=trace.name,
            kv_bytes_per_token=round(arguments.kv_kib * _KIB),
            blocks=blocks,
            checkpoints=checkpoints,
        )
    )


def _play_blocks(replay: Replay, arguments: argparse.Namespace, found: _Found) -> None:
    for share in (*arguments.sizes, EVERYTHING):
        limits = limits_of(replay.paths, share=share, ram_share=arguments.ram_share)
        for rule in (Rule.LRU,) if share == EVERYTHING else Rule:
            found.setdefault((rule.value, share), []).append(replay.play(rule, limits))


def _play_checkpoints(replay: Replay, arguments: argparse.Namespace, found: _Found) -> None:
    for share in (*arguments.sizes, EVERYTHING):
        limits = limits_of(replay.paths, share=share, ram_share=arguments.ram_share)
        # What holds everything has room for all checkpoints too.
        tokens = 0 if share == EVERYTHING else arguments.state_tokens
        size_blocks = tokens // replay.paths.block_token_count
        for budget in budgets(arguments.budgets):
            outcome = replay.play_checkpoints(budget, limits, size_blocks=size_blocks)
            found.setdefault((budget.name, share), []).append(outcome)
            if budget.victim is Victim.GAP_PER_AGE and budget.at_branches:
                outcome = replay.play_checkpoints(
                    budget, limits, size_blocks=size_blocks, rule=Rule.ENDS_DROPPED
                )
                found.setdefault((f"{budget.name}, ended dropped", share), []).append(outcome)


def _serve(arguments: argparse.Namespace) -> None:
    trace = _trace(arguments, arguments.seed)
    sending = Sending(
        time_scale=arguments.time_scale,
        duration_s=60 * arguments.minutes,
        block_token_count=arguments.block_tokens,
        ram_bytes=round(arguments.ram_mib * _MIB),
        ssd_bytes=round(arguments.ssd_mib * _MIB),
    )
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as name:
        model = model_path(arguments.model, Path(name))
        log_file = OUT / "agents.log"
        served = asyncio.run(replay_live(trace, sending, model=model, scratch=Path(name), log_file=log_file))
    report_live(served, trace=trace.name)


if __name__ == "__main__":
    main()
