"""One: a pool of one model against a plain server of it, two processes in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from bench.grpc_clients import NO_CACHE, Client, connected, stream_together, token_request
from bench.models.served import pool_process
from bench.replies import measure
from bench.report import Verdict, console, ratios, show_table, spread_of
from bench.server_process import ServerProcess

STREAM_COUNTS = (1, 16)
RATE_TARGET = 0.98
_OUTPUT_TOKEN_COUNT = 64
_PROMPT_TOKEN_COUNT = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one round, prompts included."""

    stream_count: int
    plain: float
    pool: float


async def measure_one(folder: Path, scratch: Path, log_file: Path, *, round_count: int) -> list[Rates]:
    """Ask both servers the same, in turns."""
    found: list[Rates] = []
    plain_server = ServerProcess(
        model=str(folder), cache_directory=scratch / "plain", log_file=log_file.with_suffix(".plain.log")
    )
    most = max(STREAM_COUNTS)
    async with contextlib.AsyncExitStack() as stack:
        plain_process = stack.enter_context(plain_server)
        pool = stack.enter_context(pool_process([folder], scratch, log_file=log_file))
        sides = {
            "plain": await stack.enter_async_context(connected(plain_process.address, most)),
            "pool": await stack.enter_async_context(connected(pool.address, most)),
        }
        # One round more than is kept: the first one warms both servers up.
        for number, count in itertools.product(range(round_count + 1), STREAM_COUNTS):
            rates = {}
            for side in sorted(sides, reverse=bool(number % 2)):
                rates[side] = await _rate(sides[side][:count], seed=number)
            if number:
                found.append(Rates(count, **rates))
                console.print(
                    f"{count} streams: {rates['plain']:.1f} tokens/s plain, {rates['pool']:.1f} pool"
                )
    return found


async def _rate(clients: Sequence[Client], *, seed: int) -> float:
    requests = []
    for number, _ in enumerate(clients):
        ids = [10 + (7 * seed + 13 * number + place * place) % 240 for place in range(_PROMPT_TOKEN_COUNT)]
        requests.append(token_request(ids, max_output_tokens=_OUTPUT_TOKEN_COUNT, cache=NO_CACHE))
    return measure(await stream_together(clients, requests)).tokens_per_s


def one_verdicts(found: Sequence[Rates]) -> list[Verdict]:
    """Return what is left of a plain server's rate."""
    verdicts = []
    for count in STREAM_COUNTS:
        own = [rates for rates in found if rates.stream_count == count]
        compared = ratios([r.pool for r in own], [r.plain for r in own])
        name = f"tokens per second of {count} streams, pool of one / plain"
        verdicts.append(Verdict(name, compared, RATE_TARGET, at_least=True))
    return verdicts


def show_one(found: Sequence[Rates]) -> None:
    """Print the rates."""
    rows = []
    for count in STREAM_COUNTS:
        own = [rates for rates in found if rates.stream_count == count]
        rows.append((f"{count} streams, plain", spread_of(r.plain for r in own).text(1)))
        rows.append((f"{count} streams, pool of one", spread_of(r.pool for r in own).text(1)))
    show_table("Tokens per second: median (min to max)", ("", ""), rows)
