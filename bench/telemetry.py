"""`make bench CASE=telemetry`: the same load with all telemetry on and off, as ratios of one run.

Two servers stay loaded, one without access log, metrics, traces and load reports, one with all of them:
each call's spans go to a collector in this process, and its endpoint is scraped once in every round. Only
one of them works at a time. In each round every client sends short requests one after another, so that the
work per call shows; the sides take turns to begin, and a first round is discarded. The prefix cache is on,
and after the first round it has every prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from icehouse.v1 import inference_service_pb2 as messages

from bench.grpc_clients import READ_WRITE, Client, connected, token_request
from bench.kv_events import measure_events, report_events
from bench.model_folder import model_path
from bench.prompts import SHORT_PROMPT_TOKEN_COUNT, short_prompts
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
from bench.server_process import ServerProcess, free_port

RATIO_TARGET = 0.98
_QUIET = ("--no-access-log",)
_TOKEN_COUNT, _EVENTS_TOKEN_COUNT = 16, 64
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one side in one round."""

    tokens_per_s: float
    ttft_p50_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One loaded server and its clients."""

    name: str
    clients: Sequence[Client]
    metrics_url: str = ""


class Collector:
    """Takes spans over OTLP and forgets them."""

    def __init__(self) -> None:
        self.byte_count = 0

    def export(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Count the spans; an empty answer accepts all of them."""
        self.byte_count += len(request)
        return b""


def main() -> None:
    """Measure, print the tables, write bench/out/telemetry.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=telemetry", description=__doc__)
    parser.add_argument("--model", default="random", help="random, or as for icehouse serve")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client in a round")
    parser.add_argument("--tokens", type=int, help="output tokens per reply")
    parser.add_argument(
        "--events", action="store_true", help="times between tokens with subscribers of KV events, instead"
    )
    parser.add_argument("--stalled", type=int, default=4, help="subscribers that take nothing, with --events")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (_EVENTS_TOKEN_COUNT if arguments.events else _TOKEN_COUNT)
    began = time.monotonic()
    if arguments.events:
        found = asyncio.run(measure_events(arguments))
        report_events(found, arguments, duration_s=time.monotonic() - began)
        return
    with collecting() as (collector, endpoint):
        rounds = asyncio.run(_measure(arguments, endpoint))
    assert collector.byte_count, "no span came: what is measured is not what is meant"
    _report(rounds, arguments, duration_s=time.monotonic() - began)


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Yield a collector and its endpoint."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    method: Any = grpc.unary_unary_rpc_method_handler(collector.export)
    service, name = _EXPORT[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


async def _measure(arguments: argparse.Namespace, endpoint: str) -> dict[str, list[Round]]:
    OUT.mkdir(parents=True, exist_ok=True)
    metrics_port = free_port()
    watched = (
        *("--access-log", "--load-report", "--metrics-port", str(metrics_port)),
        *("--traces-endpoint", endpoint),
    )
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = model_path(arguments.model, scratch)
        sides = []
        for name, flags in (("off", _QUIET), ("on", watched)):
            console.print(f"starting the server with everything {name}")
            server = stack.enter_context(
                ServerProcess(
                    model=str(path),
                    cache_directory=scratch / name,
                    log_file=OUT / f"telemetry-{name}.log",
                    flags=flags,
                )
            )
            clients = await stack.enter_async_context(connected(server.address, arguments.clients))
            url = f"http://127.0.0.1:{metrics_port}/metrics" if name == "on" else ""
            sides.append(Side(name, clients, url))
        return await _rounds(sides, arguments)


async def _rounds(sides: Sequence[Side], arguments: argparse.Namespace) -> dict[str, list[Round]]:
    texts = short_prompts(arguments.clients, seed=1)
    first = sides[0].clients[0]
    prompts = [(await first.tokenize(text))[:SHORT_PROMPT_TOKEN_COUNT] for text in texts]
    requests = [token_request(p, max_output_tokens=arguments.tokens, cache=READ_WRITE) for p in prompts]
    for request in requests:
        request.sampling.ignore_end_tokens = True
    measured: dict[str, list[Round]] = {side.name: [] for side in sides}
    for round_index in range(arguments.rounds + 1):
        for side in sides if round_index % 2 else reversed(sides):
            seen = await _round(side, requests, request_count=arguments.requests)
            if round_index:
                measured[side.name].append(seen)
        console.print(f"round {round_index} of {arguments.rounds} done" if round_index else "warm-up done")
    return measured


async def _round(side: Side, requests: Sequence[messages.GenerateRequest], *, request_count: int) -> Round:
    ttfts: list[float] = []

    async def one_after_another(client: Client, request: messages.GenerateRequest) -> None:
        for _ in range(request_count):
            reply, _, _ = await client.stream(request)
            assert len(reply.token_ids) == request.max_output_tokens, "a reply ended early"
            ttfts.append(reply.ttft_s)

    began = time.perf_counter()
    scraping = asyncio.create_task(asyncio.to_thread(_scrape, side.metrics_url))
    await asyncio.gather(*map(one_after_another, side.clients, requests))
    elapsed_s = time.perf_counter() - began
    await scraping
    token_count = sum(request.max_output_tokens for request in requests) * request_count
    return Round(token_count / elapsed_s, quantile(ttfts, 0.5))


def _scrape(url: str) -> None:
    if url:
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert b"icehouse_engine_requests" in answer.read(), "the endpoint does not know the engine"


def _report(rounds: dict[str, list[Round]], arguments: argparse.Namespace, *, duration_s: float) -> None:
    on, off = rounds["on"], rounds["off"]
    tokens = ratios([r.tokens_per_s for r in on], [r.tokens_per_s for r in off])
    ttft = ratios([r.ttft_p50_s for r in on], [r.ttft_p50_s for r in off])
    show_table(
        "Everything on / everything off: median (min to max)",
        ("", "off", "on", "ratio within each round"),
        (
            _row("output tokens/s", [r.tokens_per_s for r in off], [r.tokens_per_s for r in on], tokens),
            _row("TTFT p50, s", [r.ttft_p50_s for r in off], [r.ttft_p50_s for r in on], ttft),
        ),
    )
    verdict = Verdict("throughput, on / off", tokens, RATIO_TARGET, at_least=True)
    show_verdicts((verdict,))
    content = {
        "setting": setting(),
        "arguments": vars(arguments),
        "duration_s": duration_s,
        "rounds": rounds,
        "tokens_ratio": tokens,
        "ttft_ratio": ttft,
    }
    console.print(f"{write_json('telemetry', content)} ({duration_s:.0f} s)")


def _row(what: str, off: Sequence[float], on: Sequence[float], ratio: Spread) -> tuple[str, ...]:
    return what, spread_of(off).text(), spread_of(on).text(), ratio.text(3)


if __name__ == "__main__":
    main()
