"""`make bench-load`: clients that keep a server busy for a while; latency of the second half over the first.

Each client sends one request after another with a prompt of its own, the prefix cache on. A server that
leaks or degrades shows a ratio that grows with the time it is given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.grpc_clients import READ_WRITE, Client, text_request
from bench.prompts import short_prompts
from bench.random_model import make_random_model
from bench.replies import Reply, measure, quantile
from bench.report import OUT, console, setting, show_table, write_json
from bench.server_process import ServerProcess

_PROMPTS_PER_CLIENT = 8


def main() -> None:
    """Load the server, print the table, write bench/out/load.json."""
    parser = argparse.ArgumentParser(prog="make bench-load", description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens per reply")
    arguments = parser.parse_args()
    replies = asyncio.run(_measure(arguments.clients, arguments.seconds, arguments.tokens))
    _report(replies, client_count=arguments.clients)


async def _measure(client_count: int, duration_s: float, max_output_tokens: int) -> list[Reply]:
    OUT.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = make_random_model(scratch)
        server = stack.enter_context(
            ServerProcess(model=str(path), cache_directory=scratch / "blocks", log_file=OUT / "load.log")
        )
        texts = short_prompts(client_count * _PROMPTS_PER_CLIENT, seed=2)
        deadline = time.perf_counter() + duration_s
        jobs = (
            _keep_asking(server.address, texts[i::client_count], deadline, max_output_tokens)
            for i in range(client_count)
        )
        return [reply for found in await asyncio.gather(*jobs) for reply in found]


async def _keep_asking(
    address: str, texts: Sequence[str], deadline: float, max_output_tokens: int
) -> list[Reply]:
    """Send requests one after another until the deadline; the one under way then still ends."""
    client = Client(address)
    await client.ready()
    replies: list[Reply] = []
    try:
        while time.perf_counter() < deadline:
            text = texts[len(replies) % len(texts)]
            request = text_request(text, max_output_tokens=max_output_tokens, cache=READ_WRITE)
            replies.append((await client.stream(request))[0])
    finally:
        await client.close()
    return replies


def _report(replies: Sequence[Reply], *, client_count: int) -> None:
    ordered = sorted(replies, key=lambda reply: reply.start_time_s)
    half = len(ordered) // 2
    assert half, "too few replies to compare two halves; give it more --seconds"
    first, second = measure(ordered[:half]), measure(ordered[half:])
    compared = {
        "TTFT p50": (first.ttft_p50_s, second.ttft_p50_s),
        "TTFT p95": (first.ttft_p95_s, second.ttft_p95_s),
        "inter-token p50": (first.itl_p50_s, second.itl_p50_s),
        "inter-token p99": (first.itl_p99_s, second.itl_p99_s),
    }
    show_table(
        f"{client_count} clients, {len(ordered)} replies: second half of the run over the first",
        ("latency", "ratio", "first half, ms", "second half, ms"),
        (
            (name, f"{late / early:.2f}", f"{1000 * early:.0f}", f"{1000 * late:.0f}")
            for name, (early, late) in compared.items()
        ),
    )
    longest_s = quantile([reply.token_times_s[-1] - reply.start_time_s for reply in ordered], 1.0)
    content = {"setting": setting(), "clients": client_count, "replies": len(ordered)}
    path = write_json("load", {**content, "halves": [first, second], "longest_reply_s": longest_s})
    console.print(str(path))


if __name__ == "__main__":
    main()
