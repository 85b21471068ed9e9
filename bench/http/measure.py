"""`make bench CASE=http`: what the way through the HTTP front costs, against gRPC to the same server.

One server with a model of random weights, and `icehouse-http` in front of it. First the front's memory while
nobody calls. Then one caller streams the same cached prompt in turn over gRPC and through the front, in chat,
messages and responses, the order turning: the difference of the times to the first text. Then 64 callers at
once, rounds over gRPC and through the front in turn: tokens a second, and the processor time of each process.
All callers are in this process, without a client library's time in HTTP's. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import prompt_pb2

from bench.grpc_clients import READ_WRITE, Client, connected
from bench.http.caller import Caller, Protocol, body_of
from bench.http.process import Memory, bare_python_memory, cpu_s, memory_of, running_front
from bench.model_folder import model_path
from bench.prompts import short_prompts
from bench.replies import quantile
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

ADDED_TTFT_TARGET_MS = 3.0
RATE_TARGET = 0.97
IDLE_MEMORY_TARGET_MIB = 40.0
_SERVER_FLAGS = ("--no-ssd", "--no-access-log")
_GRPC = "grpc"
_SETTLE_S = 1.0
_WARM_UP_COUNT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Crowd:
    """One round of many callers, over gRPC or through the front. Processor time is per 1,000 tokens."""

    side: str
    tokens_per_s: float
    door_cpu_s: float
    server_cpu_s: float
    callers_cpu_s: float

    @property
    def cpu_s(self) -> float:
        """Of all of them."""
        return self.door_cpu_s + self.server_cpu_s + self.callers_cpu_s


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """All that was measured."""

    idle: Memory
    bare: Memory
    first_texts_ms: dict[str, list[float]]
    request_cpu_ms: float
    """Processor time of the front for one of these requests."""
    crowds: list[Crowd]


def main() -> None:
    """Measure, print the tables, write bench/out/http.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=http", description=__doc__)
    parser.add_argument("--model", default="small", help="random, small and so on, or as for icehouse serve")
    parser.add_argument("--requests", type=int, default=60, help="measured requests of each protocol")
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds of many callers, on each side")
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each stream of many")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="keep the server on one core, the front and its callers on the others: as where a GPU computes",
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(_measure(arguments))
    _report(found, arguments, duration_s=time.monotonic() - began)


async def _measure(arguments: argparse.Namespace) -> Found:
    OUT.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        server = ServerProcess(
            model=str(model_path(arguments.model, scratch)),
            cache_directory=scratch / "blocks",
            log_file=OUT / "http.log",
            flags=(*_SERVER_FLAGS, "--decode-batch-limit", str(arguments.callers)),
        )
        if arguments.apart:
            # Processes keep the cores of whoever starts them.
            cores = os.sched_getaffinity(0)
            stack.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, {min(cores)})
        stack.enter_context(server)
        if arguments.apart:
            os.sched_setaffinity(0, cores - {min(cores)})
        url, pid = stack.enter_context(running_front(server.address, log=OUT / "http-front.log"))
        await asyncio.sleep(_SETTLE_S)
        idle, bare = memory_of(pid), bare_python_memory()
        before_s = cpu_s(pid)
        first_texts_ms = await _first_texts(server.address, url, request_count=arguments.requests)
        request_count = len(Protocol) * (arguments.requests + _WARM_UP_COUNT)
        request_cpu_ms = 1000 * (cpu_s(pid) - before_s) / request_count
        crowds = []
        for index in range(-1, arguments.rounds):
            sides = (_GRPC, "http") if index % 2 else ("http", _GRPC)
            for side in sides:
                crowd = await _crowd(side, server, url, pid, arguments)
                if index >= 0:
                    crowds.append(crowd)
    return Found(idle, bare, first_texts_ms, request_cpu_ms, crowds)


async def _first_texts(address: str, url: str, *, request_count: int) -> dict[str, list[float]]:
    """Return the times to the first text in milliseconds, by side, one for each turn."""
    [text] = short_prompts(1, seed=1)
    sides = (None, *Protocol)
    times_ms: dict[str, list[float]] = {_label(side): [] for side in sides}
    async with connected(address, 1) as [client], contextlib.AsyncExitStack() as stack:
        callers = {side: await stack.enter_async_context(Caller.connected(url)) for side in Protocol}
        for turn in range(-_WARM_UP_COUNT, request_count):
            first = turn % len(sides)
            for side in sides[first:] + sides[:first]:
                if side is None:
                    reply, _, _ = await client.stream(_request(text, max_output_tokens=2))
                    ttft_s = reply.ttft_s
                else:
                    body = body_of(side, text, max_output_tokens=2)
                    ttft_s = (await callers[side].stream(side, body)).ttft_s
                if turn >= 0:
                    times_ms[_label(side)].append(ttft_s * 1000)
    return times_ms


def _label(side: Protocol | None) -> str:
    return _GRPC if side is None else side.label


def _request(text: str, *, max_output_tokens: int) -> messages.GenerateRequest:
    turn = prompt_pb2.ChatMessage(role=prompt_pb2.ROLE_USER, content=text)
    chat = prompt_pb2.ChatPrompt(messages=[turn])
    return messages.GenerateRequest(
        prompt={"chat": chat}, max_output_tokens=max_output_tokens, cache=READ_WRITE
    )


async def _crowd(
    side: str, server: ServerProcess, url: str, door_pid: int, arguments: argparse.Namespace
) -> Crowd:
    """Let all callers stream at once. Their prompts are the same in every round."""
    texts = short_prompts(arguments.callers, seed=2)
    async with contextlib.AsyncExitStack() as stack:
        if side == _GRPC:
            clients = await stack.enter_async_context(connected(server.address, len(texts)))
            asking = [_token_count(c, t, arguments.tokens) for c, t in zip(clients, texts, strict=True)]
        else:
            callers = [await stack.enter_async_context(Caller.connected(url)) for _ in texts]
            bodies = [body_of(Protocol.CHAT, text, max_output_tokens=arguments.tokens) for text in texts]
            asking = [_heard_count(c, b) for c, b in zip(callers, bodies, strict=True)]
        pids = (door_pid, server.process_id, os.getpid())
        before_s, began = [cpu_s(pid) for pid in pids], time.perf_counter()
        token_count = sum(await asyncio.gather(*asking))
        took_s, after_s = time.perf_counter() - began, [cpu_s(pid) for pid in pids]
    spent_s = [1000 * (b - a) / token_count for a, b in zip(before_s, after_s, strict=True)]
    return Crowd(side, token_count / took_s, *spent_s)


async def _token_count(client: Client, text: str, max_output_tokens: int) -> int:
    reply, _, _ = await client.stream(_request(text, max_output_tokens=max_output_tokens))
    return len(reply.token_ids)


async def _heard_count(caller: Caller, body: bytes) -> int:
    return (await caller.stream(Protocol.CHAT, body)).output_token_count


def _report(found: Found, arguments: argparse.Namespace, *, duration_s: float) -> None:
    grpc_ms = found.first_texts_ms[_GRPC]
    added_ms = {
        side: [through - direct for through, direct in zip(times_ms, grpc_ms, strict=True)]
        for side, times_ms in found.first_texts_ms.items()
        if side != _GRPC
    }
    show_table(
        "Milliseconds to the first text, and those that the front adds",
        ("", "p50", "added, p50", "added, p95"),
        [("grpc", f"{quantile(grpc_ms, 0.5):.2f}", "", "")]
        + [
            (
                side,
                *(f"{v:.2f}" for v in (_p50(found.first_texts_ms[side]), _p50(more), quantile(more, 0.95))),
            )
            for side, more in added_ms.items()
        ],
    )
    console.print(f"the front's processor time for one of these requests: {found.request_cpu_ms:.2f} ms")
    through = [crowd for crowd in found.crowds if crowd.side != _GRPC]
    direct = [crowd for crowd in found.crowds if crowd.side == _GRPC]
    show_table(
        f"{arguments.callers} streams at once; processor seconds per 1,000 tokens",
        ("", "tokens/s", "front", "server", "callers", "all"),
        [_crowd_cells(_GRPC, direct), _crowd_cells("http", through)],
    )
    show_table(
        "MiB of the front while nobody calls",
        ("", "private", "anonymous", "resident"),
        [_memory_cells("front", found.idle), _memory_cells("Python that does nothing", found.bare)],
    )
    over_mib = found.idle.private_mib - found.bare.private_mib
    rates = ratios([c.tokens_per_s for c in through], [c.tokens_per_s for c in direct])
    verdicts = [
        Verdict(f"first text, {side}: ms added", spread_of(more), ADDED_TTFT_TARGET_MS, at_least=False)
        for side, more in added_ms.items()
    ]
    verdicts += [
        Verdict(f"{arguments.callers} streams: tokens/s over gRPC's", rates, RATE_TARGET, at_least=True),
        Verdict(
            "idle: private MiB over Python's", spread_of([over_mib]), IDLE_MEMORY_TARGET_MIB, at_least=False
        ),
    ]
    show_verdicts(verdicts)
    path = write_json(
        "http",
        {
            "setting": setting(),
            "plan": vars(arguments),
            "duration_s": duration_s,
            "targets": verdicts,
            "found": found,
        },
    )
    console.print(f"{path}; {duration_s:.0f} s")


def _p50(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def _crowd_cells(side: str, crowds: Sequence[Crowd]) -> tuple[str, ...]:
    return (
        side,
        spread_of(c.tokens_per_s for c in crowds).text(0),
        *(
            f"{_p50(values):.2f}"
            for values in (
                [c.door_cpu_s for c in crowds],
                [c.server_cpu_s for c in crowds],
                [c.callers_cpu_s for c in crowds],
                [c.cpu_s for c in crowds],
            )
        ),
    )


def _memory_cells(name: str, memory: Memory) -> tuple[str, ...]:
    cells = (memory.private_mib, memory.anonymous_mib, memory.resident_mib)
    return (name, *(f"{cell:.1f}" for cell in cells))


if __name__ == "__main__":
    main()
