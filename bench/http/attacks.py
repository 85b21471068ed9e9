"""`make bench CASE=httpattacks`: what a hostile caller of the HTTP front does to another's short request.

A server with default settings and tokens for two tenants, and `icehouse-http` in front of it, a new one for
each attack. One tenant streams a short answer over and over through the front, first while nobody attacks,
then beside the attack, which runs in a process of its own; `/health` is asked meanwhile, without a token. At
last it asks beside a process that attacks nobody and takes as much of the processor as the hostile one did:
where all share two cores, only what is beyond that is the front's doing. The hostile caller has another
machine's address, a gigabit line and so many new connections a second (`--connections-per-s`).

Wanted: every request answered, and in the median its first text after at most three times the idle time and
one pass, which is the 99th percentile of the server's own passes under the attack (as in `bench.attacks`).
Memory is the front's highest while it is attacked; its waits are those of its event loop for a processor, in
seconds a second. `--model tiny` makes passes so short that what is left is the front's. Linux only: it reads
/proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import random
import resource
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from icehouse_server.rpc.access.caller import CallerRole
from icehouse_server.rpc.access.tokens import line_of, new_token

from bench.attacks import pass_time_s
from bench.http.caller import Caller, CallFailed, Protocol, body_of
from bench.http.hostile import ATTACKS, HostileCaller
from bench.http.process import cpu_s, memory_of, running_front, waited_s
from bench.random_model import RandomModel, make_random_model
from bench.replies import quantile
from bench.report import OUT, setting, show_table, write_json
from bench.server_process import ServerProcess

_IDLE_FACTOR = 3.0
_IDLE_S = 6.0
_BUILD_UP_S = 3.0
"""From the first connection until most of them are there."""
_CALL_TIMEOUT_S = 30.0
_LONGEST_PAUSE_S = 0.2
_HEALTH_PAUSE_S = 0.1
_FILE_LIMIT = 8192
_BUSY_INTERVAL_S = 0.01
_CONNECTIONS_PER_S = 500.0
_CONTEXT = multiprocessing.get_context("spawn")


@dataclasses.dataclass(slots=True)
class Suffered:
    """What a caller saw for a while. Times in seconds."""

    ttfts: list[float] = dataclasses.field(default_factory=list)
    checks: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One attack's line of the table."""

    attack: str
    idle_p50_s: float
    busy_p50_s: float
    """Beside a process that is as busy as the hostile one."""
    pass_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_max_s: float
    answered: int
    failed: int
    health_max_s: float
    front_cpu_share: float
    front_wait_share: float
    hostile_cpu_share: float
    front_private_mib: float
    hostile_calls: str

    @property
    def verdict(self) -> str:
        """What of the promise was kept."""
        missed = []
        if not self.answered or self.failed:
            missed.append("answers")
        if not self.ttft_p50_s <= _IDLE_FACTOR * self.idle_p50_s + self.pass_s:
            missed.append("ttft")
        return "pass" if not missed else f"miss: {', '.join(missed)}"


async def suffer(url: str, token: str, *, seconds: float) -> Suffered:
    """Ask and check health for so long, on connections of their own."""
    suffered = Suffered()
    end = time.monotonic() + seconds
    await asyncio.gather(_ask(url, token, suffered, end), _check(url, suffered, end))
    return suffered


async def _ask(url: str, token: str, suffered: Suffered, end: float) -> None:
    body = body_of(Protocol.CHAT, "Hello", max_output_tokens=2)
    dice = random.Random(0)
    while time.monotonic() < end:
        with _told(suffered):
            async with asyncio.timeout(_CALL_TIMEOUT_S), Caller.connected(url, token=token) as caller:
                suffered.ttfts.append((await caller.stream(Protocol.CHAT, body)).ttft_s)
        await asyncio.sleep(dice.uniform(0.0, _LONGEST_PAUSE_S))


async def _check(url: str, suffered: Suffered, end: float) -> None:
    while time.monotonic() < end:
        began = time.monotonic()
        with _told(suffered):
            async with asyncio.timeout(_CALL_TIMEOUT_S), Caller.connected(url) as caller:
                await caller.ask("GET", "/health")
                suffered.checks.append(time.monotonic() - began)
        await asyncio.sleep(_HEALTH_PAUSE_S)


@contextlib.contextmanager
def _told(suffered: Suffered) -> Iterator[None]:
    """Keep what a request fails with."""
    try:
        yield
    except (CallFailed, OSError, TimeoutError) as error:
        suffered.failures.append(f"{type(error).__name__}: {error}")


def attack(hostile: HostileCaller, name: str, seconds: float, begun: Any, ended: Any) -> None:
    """Be the hostile process: say that it begins, attack for some seconds and tell what came back."""
    _raise_file_limit()
    begun.set()

    async def run() -> None:
        began_s = time.process_time()
        attacking = asyncio.ensure_future(getattr(hostile, name)())
        if parent := multiprocessing.parent_process():
            # A bench that is killed takes the attack along.
            asyncio.get_running_loop().add_reader(parent.sentinel, attacking.cancel)
        await asyncio.wait((attacking,), timeout=seconds)
        ended.put((dict(hostile.ended), (time.process_time() - began_s) / seconds))
        attacking.cancel()
        await asyncio.wait((attacking,))

    asyncio.run(run())


def keep_busy(share: float) -> None:
    """Be a process that takes so much of a processor, and ends with the bench."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while True:
        until = time.process_time() + share * _BUSY_INTERVAL_S
        while time.process_time() < until:
            pass
        if multiprocessing.connection.wait([parent.sentinel], (1 - share) * _BUSY_INTERVAL_S):
            return


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _FILE_LIMIT), hard))


def measure(
    name: str, address: str, tokens: dict[str, str], *, seconds: float, connections_per_s: float
) -> tuple[Row, list[str]]:
    """Start a front, attack it and measure; return the failures too."""
    with running_front(address, log=OUT / "httpattacks-front.log") as (url, pid):
        asyncio.run(suffer(url, tokens["good"], seconds=1.0))
        idle = asyncio.run(suffer(url, tokens["good"], seconds=_IDLE_S))
        place = urllib.parse.urlsplit(url)
        assert place.hostname and place.port
        caller = HostileCaller(
            place.hostname, place.port, tokens["hostile"], connections_per_s=connections_per_s
        )
        begun, ended = _CONTEXT.Event(), _CONTEXT.Queue()
        with _process(attack, caller, name, _BUILD_UP_S + seconds, begun, ended):
            # A process takes seconds to start where the processor is shared.
            assert begun.wait(_CALL_TIMEOUT_S), "the hostile process did not start"
            time.sleep(_BUILD_UP_S)
            before_s, waited_before_s = cpu_s(pid), waited_s(pid)
            beside, memory_mib = asyncio.run(_beside(url, pid, tokens["good"], seconds=seconds))
            share = (cpu_s(pid) - before_s) / seconds
            wait_share = (waited_s(pid) - waited_before_s) / seconds
            pass_s = asyncio.run(pass_time_s(address, tokens["operator"]))
            calls, hostile_share = ended.get(timeout=_CALL_TIMEOUT_S)
        with _process(keep_busy, min(hostile_share, 1.0)):
            busy = asyncio.run(suffer(url, tokens["good"], seconds=_IDLE_S))
    row = Row(
        attack=name,
        idle_p50_s=quantile(idle.ttfts, 0.5),
        busy_p50_s=quantile(busy.ttfts, 0.5),
        pass_s=pass_s,
        ttft_p50_s=quantile(beside.ttfts, 0.5),
        ttft_p95_s=quantile(beside.ttfts, 0.95),
        ttft_max_s=max(beside.ttfts, default=math.nan),
        answered=len(beside.ttfts),
        failed=len(beside.failures),
        health_max_s=max(beside.checks, default=math.nan),
        front_cpu_share=share,
        front_wait_share=wait_share,
        hostile_cpu_share=hostile_share,
        front_private_mib=memory_mib,
        hostile_calls=", ".join(f"{count} {code}" for code, count in calls.items()) or "all open",
    )
    return row, beside.failures


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    process = _CONTEXT.Process(target=target, args=arguments)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


async def _beside(url: str, pid: int, token: str, *, seconds: float) -> tuple[Suffered, float]:
    """Return what a caller suffers, and the front's highest memory meanwhile."""
    suffering = asyncio.ensure_future(suffer(url, token, seconds=seconds))
    highest_mib = 0.0
    while not suffering.done():
        await asyncio.wait({suffering}, timeout=0.25)
        highest_mib = max(highest_mib, memory_of(pid).private_mib)
    return suffering.result(), highest_mib


def _token_line(name: str, token: str) -> str:
    role = CallerRole.OPERATOR if name == "operator" else CallerRole.TENANT
    return line_of(token, tenant=name, role=role, expire_date=None)


def _cells(row: Row) -> list[str]:
    shown = dataclasses.asdict(row)
    return [f"{v:.3f}" if isinstance(v, float) else str(v) for v in shown.values()] + [row.verdict]


def main() -> None:
    """Measure, print the table, write bench/out/httpattacks.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=httpattacks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each attack is measured")
    parser.add_argument(
        "--connections-per-s",
        type=float,
        default=_CONNECTIONS_PER_S,
        help="how many the hostile caller opens at most; inf: whatever it can",
    )
    models = [which.value for which in RandomModel]
    parser.add_argument("--model", default=RandomModel.SMALL.value, choices=models, help="which one is made")
    parser.add_argument("--only", nargs="*", default=ATTACKS, choices=ATTACKS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    _raise_file_limit()
    rows: list[Row] = []
    tokens = {"hostile": new_token(), "good": new_token(), "operator": new_token()}
    with tempfile.TemporaryDirectory(prefix="icehouse-bench-") as scratch:
        file = Path(scratch) / "tokens"
        file.write_text("".join(f"{_token_line(name, token)}\n" for name, token in tokens.items()))
        file.chmod(0o600)
        model = make_random_model(Path(scratch), which=RandomModel(arguments.model))
        with ServerProcess(
            model=str(model),
            cache_directory=Path(scratch) / "blocks",
            log_file=OUT / "httpattacks.log",
            flags=("--token-file", str(file), "--no-ssd", "--no-access-log"),
        ) as server:
            for name in arguments.only:
                row, failures = measure(
                    name,
                    server.address,
                    tokens,
                    seconds=arguments.seconds,
                    connections_per_s=arguments.connections_per_s,
                )
                rows.append(row)
                # Line by line too: the whole takes a quarter of an hour.
                print(*_cells(row), sep=" | ", flush=True)
                for failure in dict.fromkeys(failures):
                    print("   ", failure, flush=True)
    columns = [*(field.name for field in dataclasses.fields(Row)), "verdict"]
    show_table("one hostile caller of the HTTP front", columns, [_cells(row) for row in rows])
    shown = [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows]
    write_json("httpattacks", {"setting": setting(), "seconds": arguments.seconds, "rows": shown})


if __name__ == "__main__":
    main()
