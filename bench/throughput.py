"""`make bench`: the server over gRPC against the same engine called in process, as ratios of one run.

One server and one in-process engine (mlx-lm's BatchGenerator, defaults, same folder and dtype) stay
loaded; only one of them computes at a time. Each round runs both sides at each number of clients, the
first side in turn, and a first round is thrown away. Every client has a prompt of its own, sent as
tokens; the prefix cache is off, replies are greedy and end at the same tokens on both sides.

The default model is made of random weights (bench.random_model): a step of it is short, so that what
the server adds to a step shows. `--model demo` measures the real one, more slowly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from icehouse_server.bootstrap.model_source import locate_model
from icehouse_server.cli.terminal.console import build_progress
from icehouse_server.config import ModelConfig

from bench.engine_process import EngineProcess
from bench.grpc_clients import Client, stream_together, token_request
from bench.plots import plot_throughput
from bench.prompts import short_prompts
from bench.random_model import make_random_model
from bench.replies import Reply, RoundMetrics, measure
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
from bench.server_process import ServerProcess

CLIENT_COUNTS = (1, 4, 16, 64)
PROMPT_TOKEN_COUNT = 24
DECODE_RATIO_TARGET = 0.95
TTFT_OVERHEAD_TARGET_MS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    round_count: int
    lone_repeat_count: int
    """How often a round repeats the case of one client, which is short and therefore noisy."""
    max_output_tokens: int


FULL = Plan(round_count=5, lone_repeat_count=4, max_output_tokens=32)
QUICK = Plan(round_count=2, lone_repeat_count=2, max_output_tokens=16)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Both sides of one case in one round."""

    client_count: int
    server: RoundMetrics
    engine: RoundMetrics
    equal_reply_count: int


def main() -> None:
    """Measure, print the tables, write bench/out/throughput.json and .png."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short rounds, about two minutes")
    parser.add_argument("--model", default="random", help="random, or as for icehouse serve")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENT_COUNTS)
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--tokens", type=int, help="output tokens per reply")
    parser.add_argument("--serve-flags", default="", help="more flags for icehouse serve, in one string")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    plan = dataclasses.replace(
        plan,
        round_count=arguments.rounds or plan.round_count,
        max_output_tokens=arguments.tokens or plan.max_output_tokens,
    )
    began = time.monotonic()
    pairs = asyncio.run(
        _measure(arguments.model, plan, tuple(arguments.clients), arguments.serve_flags.split())
    )
    _report(pairs, plan, duration_s=time.monotonic() - began)


async def _measure(model: str, plan: Plan, client_counts: Sequence[int], flags: Sequence[str]) -> list[Pair]:
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "throughput.log"
    log_file.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = model_path(model, scratch)
        console.print(f"starting the server and the in-process engine with {path.name}")
        server = stack.enter_context(
            ServerProcess(model=str(path), cache_directory=scratch / "blocks", log_file=log_file, flags=flags)
        )
        clients = [Client(server.address) for _ in range(max(client_counts))]
        await asyncio.gather(*(client.ready() for client in clients))
        try:
            dtype = (await clients[0].model()).dtype
            engine = stack.enter_context(EngineProcess(model_path=path, dtype=dtype, log_file=log_file))
            return await _rounds(clients, engine, plan, client_counts)
        finally:
            await asyncio.gather(*(client.close() for client in clients))


def model_path(model: str, scratch: Path) -> Path:
    """Return the folder of the model to measure, made first where it is a random one."""
    if model == "random":
        return make_random_model(scratch)
    with build_progress() as on_progress:
        return locate_model(ModelConfig(model=model), on_progress=on_progress).path


async def _rounds(
    clients: Sequence[Client], engine: EngineProcess, plan: Plan, client_counts: Sequence[int]
) -> list[Pair]:
    prompts = await _choose_prompts(clients[0], engine, plan, count=max(client_counts))
    pairs: list[Pair] = []
    for round_index in range(plan.round_count + 1):
        for count in client_counts:
            repeats = plan.lone_repeat_count if count == 1 and round_index else 1
            for repeat in range(repeats):
                first = (
                    (round_index * plan.lone_repeat_count + repeat) * count % len(prompts)
                    if count == 1
                    else 0
                )
                chosen = slice(first, first + count)
                pair = await _both_sides(
                    clients[:count],
                    engine,
                    prompts[chosen],
                    plan.max_output_tokens,
                    server_first=(round_index + repeat) % 2 == 0,
                )
                if round_index:
                    pairs.append(pair)
        name = f"round {round_index} of {plan.round_count}" if round_index else "warm-up round"
        console.print(f"{name} done")
    return pairs


async def _both_sides(
    clients: Sequence[Client],
    engine: EngineProcess,
    prompts: Sequence[Sequence[int]],
    max_output_tokens: int,
    *,
    server_first: bool,
) -> Pair:
    requests = [token_request(prompt, max_output_tokens=max_output_tokens) for prompt in prompts]
    served: list[Reply] = []
    if server_first:
        served = await stream_together(clients, requests)
    called = await asyncio.to_thread(engine.generate, prompts, max_output_tokens=max_output_tokens)
    if not server_first:
        served = await stream_together(clients, requests)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(served, called, strict=True))
    return Pair(len(clients), measure(served), measure(called), equal)


async def _choose_prompts(
    client: Client, engine: EngineProcess, plan: Plan, *, count: int
) -> list[list[int]]:
    """Return prompts whose replies do not end early: every reply then costs the same."""
    texts = short_prompts(count + count // 4 + 4, seed=1)
    prompts = [(await client.tokenize(text))[:PROMPT_TOKEN_COUNT] for text in texts]
    replies = await asyncio.to_thread(engine.generate, prompts, max_output_tokens=plan.max_output_tokens)
    whole = [i for i, r in enumerate(replies) if len(r.token_ids) == plan.max_output_tokens][:count]
    # With a model that ends most replies early the rest is filled up: tokens are counted as they come.
    whole += [i for i in range(len(texts)) if i not in whole][: count - len(whole)]
    return [prompts[i] for i in whole]


def _report(pairs: Sequence[Pair], plan: Plan, *, duration_s: float) -> None:
    by_count: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_count.setdefault(pair.client_count, []).append(pair)
    rows = [_case(count, found) for count, found in sorted(by_count.items())]
    show_table(
        "Server over gRPC / engine in process: median (min to max) of the ratio in each round",
        ("clients", "tokens/s", "decode tokens/s", "TTFT p50", "TTFT p95", "step p50", "equal replies"),
        (
            (
                str(row["clients"]),
                row["tokens_per_s_ratio"].text(),
                row["decode_ratio"].text(),
                row["ttft_p50_ratio"].text(),
                row["ttft_p95_ratio"].text(),
                row["itl_p50_ratio"].text(),
                f"{row['equal_replies']}/{row['replies']}",
            )
            for row in rows
        ),
    )
    show_table(
        "For orientation, this machine and moment only",
        (
            "clients",
            "server tok/s",
            "engine tok/s",
            "server decode",
            "engine decode",
            "server TTFT p50/p95 ms",
            "engine TTFT p50/p95 ms",
        ),
        (_orientation(row) for row in rows),
    )
    verdicts = _verdicts(by_count, rows)
    show_verdicts(verdicts)
    content = {"setting": setting(), "plan": plan, "duration_s": duration_s, "cases": rows}
    path = write_json("throughput", {**content, "targets": verdicts, "rounds": list(pairs)})
    console.print(f"{path} and {plot_throughput(rows)}; {duration_s:.0f} s")


def _orientation(row: dict[str, Any]) -> list[str]:
    """Return one case's absolute numbers, as text."""
    rates = [
        row[side][key].number(0)
        for key in ("tokens_per_s", "decode_tokens_per_s")
        for side in ("server", "engine")
    ]
    ttfts = [
        " / ".join(f"{1000 * row[side][key].median:.0f}" for key in ("ttft_p50_s", "ttft_p95_s"))
        for side in ("server", "engine")
    ]
    return [str(row["clients"]), *rates, *ttfts]


def _case(count: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    def of(side: str, name: str) -> list[float | None]:
        return [getattr(getattr(pair, side), name) for pair in pairs]

    names = [field.name for field in dataclasses.fields(RoundMetrics)]
    return {
        "clients": count,
        "tokens_per_s_ratio": ratios(of("server", "tokens_per_s"), of("engine", "tokens_per_s")),
        "decode_ratio": ratios(of("server", "decode_tokens_per_s"), of("engine", "decode_tokens_per_s")),
        "ttft_p50_ratio": ratios(of("server", "ttft_p50_s"), of("engine", "ttft_p50_s")),
        "ttft_p95_ratio": ratios(of("server", "ttft_p95_s"), of("engine", "ttft_p95_s")),
        "itl_p50_ratio": ratios(of("server", "itl_p50_s"), of("engine", "itl_p50_s")),
        "equal_replies": sum(pair.equal_reply_count for pair in pairs),
        "replies": count * len(pairs),
        "server": {name: spread_of(of("server", name)) for name in names},
        "engine": {name: spread_of(of("engine", name)) for name in names},
    }


def _verdicts(by_count: dict[int, list[Pair]], rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    verdicts = [
        Verdict(f"decode, {row['clients']} clients", row["decode_ratio"], DECODE_RATIO_TARGET, True)
        for row in rows
        if row["clients"] <= 16
    ]
    if 1 in by_count:
        overhead_ms: Spread = spread_of(
            1000 * (pair.server.ttft_p50_s - pair.engine.ttft_p50_s) for pair in by_count[1]
        )
        verdicts.append(Verdict("TTFT overhead, 1 client, ms", overhead_ms, TTFT_OVERHEAD_TARGET_MS, False))
    if 16 in by_count and 64 in by_count:
        scaling = ratios(
            [pair.server.tokens_per_s for pair in by_count[64]],
            [pair.server.tokens_per_s for pair in by_count[16]],
        )
        verdicts.append(Verdict("server, tokens/s at 64 clients / at 16", scaling, 1.0, True))
    return verdicts


if __name__ == "__main__":
    main()
