"""`make bench CASE=attacks`: what one hostile tenant does to another one's short request, attack by attack.

A gateway's worker with default settings and three tokens: of a hostile tenant, of another tenant, and of an
operator who reads the counters. For each attack the other tenant streams a short answer over and over, first
without and then during the attack, which runs in another process; health is checked meanwhile. Then the
server is told to stop while the attack continues.

Wanted: every request answered, its first token after at most three times the idle time and one pass, health
within a second, an end within what docs/running.md says of a stop with default settings. One pass is the 99th
percentile of the server's own passes under the attack. "worst" in the verdict: the median kept that
bound and the worst request did not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from icehouse.v1 import inference_service_pb2 as messages
from icehouse.v1 import inference_service_pb2_grpc, server_service_pb2, server_service_pb2_grpc
from icehouse_server.cli.service.stop_bounds import stop_bound_s
from icehouse_server.config import Config
from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from bench.hostile import ATTACKS, Hostile
from bench.random_model import RandomModel, make_random_model
from bench.replies import quantile
from bench.report import OUT, setting, show_table, write_json
from bench.server_process import ServerProcess

STOP_BOUND_S = stop_bound_s(Config())
"""The grace for running calls, and the limits of each later part of the stop."""
_CHECK_BOUND_S = 1.0
_IDLE_FACTOR = 3.0
_IDLE_S = 10.0
_BUILD_UP_S = 3.0
"""From the hostile process's start until it attacks."""
_CALL_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 0.6
"""Between two requests, drawn anew each time: after a constant pause every request would arrive at the same
moment of a pass, right after its begin."""


@dataclasses.dataclass(slots=True)
class Suffered:
    """A caller's measurements over a while. Times in seconds."""

    ttfts: list[float] = dataclasses.field(default_factory=list)
    checks: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One attack's line of the table."""

    attack: str
    idle_p50_s: float
    pass_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_max_s: float
    answered: int
    failed: int
    health_max_s: float
    stop_s: float
    hostile_calls: str

    @property
    def bound_s(self) -> float:
        """Upper bound on the time to first token."""
        return _IDLE_FACTOR * self.idle_p50_s + self.pass_s

    @property
    def verdict(self) -> str:
        """Which bounds were kept."""
        missed = []
        if not self.answered or self.failed:
            missed.append("answers")
        if not self.ttft_p50_s <= self.bound_s:
            missed.append("ttft")
        elif not self.ttft_max_s <= self.bound_s:
            missed.append("worst")
        if not self.health_max_s <= _CHECK_BOUND_S:
            missed.append("health")
        if not self.stop_s <= STOP_BOUND_S:
            missed.append("stop")
        return "pass" if not missed else f"miss: {', '.join(missed)}"


async def suffer(address: str, token: str, *, seconds: float) -> Suffered:
    """Send requests and check health for so long, each on its own connection."""
    suffered = Suffered()
    end = time.monotonic() + seconds
    await asyncio.gather(_ask(address, token, suffered, end), _check(address, suffered, end))
    return suffered


async def _ask(address: str, token: str, suffered: Suffered, end: float) -> None:
    metadata = (("authorization", f"Bearer {token}"),)
    request = messages.GenerateRequest(prompt={"text": "Hello"}, max_output_tokens=2)
    dice = random.Random(0)
    async with grpc.aio.insecure_channel(address) as channel:
        inference: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                first: float | None = None
                async for response in inference.Stream(request, metadata=metadata, timeout=_CALL_TIMEOUT_S):
                    if first is None and response.WhichOneof("event") == "delta":
                        first = time.monotonic() - began
                assert first is not None, "an answer of two tokens had no delta"
                suffered.ttfts.append(first)
            except grpc.aio.AioRpcError as error:
                suffered.failures.append(f"{error.code().name}: {error.details()}")
            await asyncio.sleep(dice.uniform(0.0, _LONGEST_PAUSE_S))


async def _check(address: str, suffered: Suffered, end: float) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                await health.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_TIMEOUT_S)
                suffered.checks.append(time.monotonic() - began)
            except grpc.aio.AioRpcError as error:
                suffered.failures.append(f"health {error.code().name}: {error.details()}")
            await asyncio.sleep(0.1)


async def pass_time_s(address: str, token: str) -> float:
    """Return the 99th percentile of the server's last passes; NaN if the server does not report it."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = server_service_pb2_grpc.ServerServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        asked = server_service_pb2.GetStatsRequest()
        try:
            answer = await stub.GetStats(asked, metadata=metadata, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return math.nan
    return float(answer.stats.engine.pass_duration_p99.ToTimedelta().total_seconds())


def attack(name: str, address: str, token: str, seconds: float, ended: Any) -> None:
    """Run the hostile process: attack, report how the calls ended after some seconds, and continue."""

    async def run() -> None:
        hostile = Hostile(address, token)
        attacking = asyncio.ensure_future(getattr(hostile, name)())
        if parent := multiprocessing.parent_process():
            # If the bench is killed, the attack ends too.
            asyncio.get_running_loop().add_reader(parent.sentinel, attacking.cancel)
        await asyncio.wait((attacking,), timeout=seconds)
        ended.put(dict(hostile.ended))
        await attacking

    # The attack ends with the server.
    with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):
        asyncio.run(run())


def measure(name: str, model: Path, folder: Path, *, seconds: float) -> tuple[Row, list[str]]:
    """Start a server, attack it, measure, and stop it under attack; return the failures too."""
    tokens = {"hostile": new_token(), "good": new_token(), "operator": new_token()}
    file = folder / "tokens"
    file.write_text("".join(f"{_token_line(name, token)}\n" for name, token in tokens.items()))
    file.chmod(0o600)
    server = ServerProcess(
        model=str(model),
        cache_directory=folder / f"blocks-{name}",
        log_file=OUT / "attacks.log",
        flags=("--token-file", str(file), "--worker"),
    )
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as running:
            running.enter_context(server)
            asyncio.run(suffer(server.address, tokens["good"], seconds=2.0))
            idle = asyncio.run(suffer(server.address, tokens["good"], seconds=_IDLE_S))
            context = multiprocessing.get_context("spawn")
            ended = context.Queue()
            hostile = context.Process(
                target=attack, args=(name, server.address, tokens["hostile"], seconds, ended)
            )
            hostile.start()
            held.callback(hostile.join)
            held.callback(hostile.kill)
            time.sleep(_BUILD_UP_S)
            beside = asyncio.run(suffer(server.address, tokens["good"], seconds=seconds))
            pass_s = asyncio.run(pass_time_s(server.address, tokens["operator"]))
            calls = ended.get(timeout=_CALL_TIMEOUT_S)
            began = time.monotonic()
            # A server that does not stop is killed, later than the bound, and reported as such.
            with contextlib.suppress(RuntimeError):
                running.close()
        stop_s = time.monotonic() - began
    row = Row(
        attack=name,
        idle_p50_s=quantile(idle.ttfts, 0.5),
        pass_s=pass_s,
        ttft_p50_s=quantile(beside.ttfts, 0.5),
        ttft_p95_s=quantile(beside.ttfts, 0.95),
        ttft_max_s=max(beside.ttfts, default=math.nan),
        answered=len(beside.ttfts),
        failed=len(beside.failures),
        health_max_s=max(beside.checks, default=math.nan),
        stop_s=stop_s,
        hostile_calls=", ".join(f"{count} {code}" for code, count in calls.items()) or "all open",
    )
    return row, beside.failures


def _token_line(name: str, token: str) -> str:
    role = CallerRole.OPERATOR if name == "operator" else CallerRole.TENANT
    return line_of(token, tenant=name, role=role, expire_date=None)


def _cells(row: Row) -> list[str]:
    shown = dataclasses.asdict(row)
    return [f"{v:.3f}" if isinstance(v, float) else str(v) for v in shown.values()] + [row.verdict]


def main() -> None:
    """Measure, print the table, write bench/out/attacks.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each attack is measured")
    parser.add_argument("--only", nargs="*", default=ATTACKS, choices=ATTACKS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        model = make_random_model(Path(scratch), which=RandomModel.SMALL)
        for name in arguments.only:
            row, failures = measure(name, model, Path(scratch), seconds=arguments.seconds)
            rows.append(row)
            # Printed line by line too: the whole takes half an hour.
            print(*_cells(row), sep=" | ", flush=True)
            for failure in dict.fromkeys(failures):
                print("   ", failure, flush=True)
    columns = [*(field.name for field in dataclasses.fields(Row)), "verdict"]
    show_table("one hostile tenant, default settings", columns, [_cells(row) for row in rows])
    shown = [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows]
    facts = {"setting": setting(), "seconds": arguments.seconds, "stop_bound_s": STOP_BOUND_S}
    write_json("attacks", {**facts, "rows": shown})


if __name__ == "__main__":
    main()
