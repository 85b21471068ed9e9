"""`make bench CASE=tenants`: can one tenant tell from the time whether another one's prompt is cached?

In each round one tenant sends a new prompt twice, cold and from RAM. Then another tenant sends the same
prompt, and one that nobody has sent before, in random order. The first pair shows that a hit is faster; the
second pair's ratio must be one, and which of the two is faster must be a coin toss.
The model has random weights and 128 KiB of KV per token (bench.random_model).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from icehouse.v1 import cache_policy_pb2

from bench.grpc_clients import Client, token_request
from bench.random_model import make_random_model
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
from bench.server_process import ServerProcess

SIDES = ("own, cold", "own, cached", "other's, cached", "nobody's")
LOWEST_TOKEN, HIGHEST_TOKEN = 10, 250
FLAGS = ("--no-ssd",)


def main() -> None:
    """Measure, print the tables, write bench/out/tenants.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=tenants", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of a prompt")
    arguments = parser.parse_args()
    began = time.monotonic()
    times = asyncio.run(_measure(round_count=arguments.rounds, token_count=arguments.tokens))
    _report(times, duration_s=time.monotonic() - began)


async def _measure(*, round_count: int, token_count: int) -> dict[str, list[float]]:
    OUT.mkdir(parents=True, exist_ok=True)
    source = random.Random(1)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        model = make_random_model(Path(scratch))
        with ServerProcess(
            model=str(model),
            cache_directory=Path(scratch) / "blocks",
            log_file=OUT / "tenants.log",
            flags=FLAGS,
        ) as server:
            client = Client(server.address)
            await client.ready()
            for round_index in range(round_count + 1):
                found = await _round(client, source, token_count)
                if round_index:
                    for side, seconds in found.items():
                        times[side].append(seconds)
            await client.close()
    return times


async def _round(client: Client, source: random.Random, token_count: int) -> dict[str, float]:
    known, unknown = (
        [source.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(token_count)] for _ in "ab"
    )
    calls = [(SIDES[0], known, "first"), (SIDES[1], known, "first")]
    rest = [(SIDES[2], known, "second"), (SIDES[3], unknown, "second")]
    source.shuffle(rest)
    return {side: await _ttft_s(client, tokens, tenant) for side, tokens, tenant in calls + rest}


async def _ttft_s(client: Client, token_ids: list[int], tenant: str) -> float:
    policy = cache_policy_pb2.CachePolicy(tenant=tenant)
    reply, _, _ = await client.stream(token_request(token_ids, max_output_tokens=2, cache=policy))
    return reply.ttft_s


def _report(times: dict[str, list[float]], *, duration_s: float) -> None:
    own = ratios(times["own, cached"], times["own, cold"])
    other = ratios(times["other's, cached"], times["nobody's"])
    pairs = zip(times["other's, cached"], times["nobody's"], strict=True)
    guess = sum(known < unknown for known, unknown in pairs) / len(times["nobody's"])
    show_table(
        "Time to the first token, ms",
        ("prompt", "median (min to max)"),
        ((side, spread_of(1000 * s for s in seconds).text(1)) for side, seconds in times.items()),
    )
    show_verdicts(
        [
            Verdict("own prompt, cached over cold", own, 0.5, at_least=False),
            Verdict("another's cached prompt over nobody's, not faster", other, 0.97, at_least=True),
            Verdict("the same, not slower", other, 1.03, at_least=False),
        ]
    )
    count = len(times["nobody's"])
    console.print(f"the other's prompt was the faster one in {guess:.0%} of {count} rounds")
    console.print(f"{duration_s:.0f} s in all")
    write_json("tenants", {"setting": setting(), "ttft_s": times, "own": own, "other": other, "guess": guess})


if __name__ == "__main__":
    main()
