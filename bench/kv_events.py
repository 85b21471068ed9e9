"""`make bench CASE=telemetry ARGS=--events`: times between tokens with subscribers of KV events and without,
as ratios of one run.

Four servers stay loaded: two without subscribers, which show how much equal servers differ; one with a
subscriber that reads; one with such a subscriber and some that accept no byte. Only one of them works at a
time. In each round every client sends new prompts, one after another, to a server whose RAM tier is small, so
that blocks come and go all the time. The order rotates from round to round, and a first round is discarded.
The 99th percentile of one round depends on some twenty passes, and differs by a third between equal servers;
so it is taken over all rounds together, each time without one of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from icehouse.v1 import inference_service_pb2 as messages

from bench.fleet.gateway import missing_packages
from bench.grpc_clients import READ_WRITE, Client, connected, token_request
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
from bench.server_process import ServerProcess
from tests.fixtures.rpc.http2 import Peer, framed, peer_of

P99_RATIO_TARGET = 1.02
_MEMORY_RATIO_TARGET = 1.1
"""For the server with stalled subscribers: the ring is bounded, and so is the state of each subscriber."""
_FLAGS = (
    *("--worker", "--no-access-log", "--block-token-count", "16", "--min-prefix-token-count", "0"),
    *("--ram-bytes", "64MiB", "--spill-policy", "off"),
)
_SUBSCRIBE = "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"
_STALL_S = 20.0
"""Less than the time after which the server ends a stalled subscriber."""
_NONE, _AGAIN, _READ, _STALLED = "none", "none again", "one reads", "one reads, others stall"


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one side in one round."""

    gaps_s: tuple[float, ...]
    """Times between tokens, of all clients."""
    tokens_per_s: float
    rss_bytes: int
    event_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One loaded server, its clients, and its subscribers."""

    name: str
    server: ServerProcess
    clients: Sequence[Client]
    event_count: Any
    """Events that the reading subscriber has got, a value shared with its process; None without one."""
    stalled: Sequence[asyncio.Task[None]]

    def told(self) -> int:
        """Return how many events were read."""
        return 0 if self.event_count is None else int(self.event_count.value)


async def measure_events(arguments: argparse.Namespace) -> dict[str, list[Round]]:
    """Return each side's rounds."""
    if missing := missing_packages(("smg_grpc_proto", "hyperframe")):
        raise SystemExit(f"not in this environment: {', '.join(missing)} (extra `dev`)")
    OUT.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = model_path(arguments.model, scratch)
        sides = []
        for index, name in enumerate((_NONE, _AGAIN, _READ, _STALLED)):
            console.print(f"starting the server for: {name}")
            server = ServerProcess(
                model=str(path),
                cache_directory=scratch / f"blocks-{index}",
                log_file=OUT / f"kv-events-{index}.log",
                flags=_FLAGS,
            )
            stack.enter_context(server)
            clients = await stack.enter_async_context(connected(server.address, arguments.clients))
            counted = stack.enter_context(_reading(server.address)) if name in (_READ, _STALLED) else None
            stalled_count = arguments.stalled if name == _STALLED else 0
            stalled = await stack.enter_async_context(_stalling(server.address, stalled_count))
            sides.append(Side(name, server, clients, counted, stalled))
        return await _rounds(sides, arguments)


async def _rounds(sides: Sequence[Side], arguments: argparse.Namespace) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {side.name: [] for side in sides}
    for round_index in range(arguments.rounds + 1):
        requests = await _new_requests(sides[0].clients[0], arguments, seed=round_index)
        turn = round_index % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            seen = await _round(side, requests)
            if round_index:
                found[side.name].append(seen)
        console.print(f"round {round_index} of {arguments.rounds} done" if round_index else "warm-up done")
    return found


async def _new_requests(
    client: Client, arguments: argparse.Namespace, *, seed: int
) -> list[messages.GenerateRequest]:
    made = []
    for text in short_prompts(arguments.clients * arguments.requests, seed=seed):
        prompt = (await client.tokenize(text))[:SHORT_PROMPT_TOKEN_COUNT]
        request = token_request(prompt, max_output_tokens=arguments.tokens, cache=READ_WRITE)
        request.sampling.ignore_end_tokens = True
        made.append(request)
    return made


async def _round(side: Side, requests: Sequence[messages.GenerateRequest]) -> Round:
    before = side.told()

    async def one_after_another(index: int, client: Client) -> list[Any]:
        return [(await client.stream(request))[0] for request in requests[index :: len(side.clients)]]

    began = time.perf_counter()
    told = await asyncio.gather(*(one_after_another(i, client) for i, client in enumerate(side.clients)))
    elapsed_s = time.perf_counter() - began
    replies = [reply for replies in told for reply in replies]
    assert all(len(r.token_ids) == requests[0].max_output_tokens for r in replies), "a reply ended early"
    assert not any(task.done() for task in side.stalled), "a subscriber stalls no longer"
    gaps = [b - a for reply in replies for a, b in itertools.pairwise(reply.token_times_s)]
    return Round(
        tuple(gaps),
        sum(len(reply.token_ids) for reply in replies) / elapsed_s,
        _rss_bytes(side.server.process_id),
        side.told() - before,
    )


@contextlib.contextmanager
def _reading(address: str) -> Any:
    """Subscribe in another process, which takes no time from the clients; yield the count of events."""
    context = multiprocessing.get_context("spawn")
    count = context.Value("q", 0)
    process = context.Process(target=_read, args=(address, count), daemon=True)
    process.start()
    try:
        yield count
    finally:
        process.kill()
        process.join()


def _read(address: str, count: Any) -> None:
    from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for batch in stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
            count.value += len(batch.events)


@contextlib.asynccontextmanager
async def _stalling(address: str, count: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run so many stalled subscribers, which subscribe again when the server has ended them."""
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(peer_of(address, window_bytes=0)) for _ in range(count)]
        tasks = [asyncio.create_task(_stall(peer)) for peer in peers]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _stall(peer: Peer) -> None:
    while True:
        stream = await peer.open_call(_SUBSCRIBE)
        # An empty message asks for the state and all later events.
        await peer.send(stream, framed(b""), end=True)
        await peer.quiet(_STALL_S)
        await peer.reset(stream)


def _rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def _p99_ratio(above: Sequence[Round], below: Sequence[Round]) -> Spread:
    """Return the ratios of two sides' p99 over all rounds but one, for each round left out."""

    def p99_without(rounds: Sequence[Round], left_out: int) -> float:
        kept = (each.gaps_s for index, each in enumerate(rounds) if index != left_out)
        return quantile(list(itertools.chain.from_iterable(kept)), 0.99)

    return spread_of(p99_without(above, i) / p99_without(below, i) for i in range(len(above)))


def report_events(
    rounds: dict[str, list[Round]], arguments: argparse.Namespace, *, duration_s: float
) -> None:
    """Print the table and the verdicts, write bench/out/kv-events.json."""
    for name in (_READ, _STALLED):
        assert all(each.event_count for each in rounds[name]), "no event came: this measures nothing"
    p99 = {name: _p99_ratio(found, rounds[_NONE]) for name, found in rounds.items()}
    memory = ratios(*([float(each.rss_bytes) for each in rounds[name]] for name in (_STALLED, _READ)))
    show_table(
        "Subscribers of KV events: median (min to max)",
        ("", "p50 between tokens, ms", "p99, ms", "p99 of all / none", "tokens/s", "RSS, MiB", "events"),
        (
            (
                name,
                spread_of(1000 * quantile(each.gaps_s, 0.5) for each in found).text(1),
                spread_of(1000 * quantile(each.gaps_s, 0.99) for each in found).text(1),
                p99[name].text(3),
                spread_of(each.tokens_per_s for each in found).number(0),
                f"{found[0].rss_bytes / 2**20:.0f} to {found[-1].rss_bytes / 2**20:.0f}",
                str(sum(each.event_count for each in found)),
            )
            for name, found in rounds.items()
        ),
    )
    show_verdicts(
        [
            Verdict(f"p99 between tokens, {name} / none", p99[name], P99_RATIO_TARGET, at_least=False)
            for name in (_READ, _STALLED)
        ]
        + [Verdict("RSS, others stall / one reads", memory, _MEMORY_RATIO_TARGET, at_least=False)]
    )
    content = {
        "setting": setting(),
        "arguments": vars(arguments),
        "duration_s": duration_s,
        "rounds": rounds,
        "p99_ratios": p99,
        "memory_ratio": memory,
    }
    console.print(f"{write_json('kv-events', content)} ({duration_s:.0f} s)")
