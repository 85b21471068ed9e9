"""One: a pool of one model against a plain server of it, two processes in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from bench.grpc_clients import NO_CACHE, Client, connected, stream_together, token_request
from bench.models.served import cpu_s, pool_process
from bench.replies import Reply, measure
from bench.report import Verdict, console, ratios, show_table, spread_of
from bench.server_process import ServerProcess

STREAM_COUNTS = (1, 16)
RATE_TARGET = 0.98
_OUTPUT_TOKEN_COUNT = 48
_PROMPT_TOKEN_COUNT = 24


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of one round, prompts included, and per second of the server's processor time."""

    stream_count: int
    plain: float
    pool: float
    plain_per_cpu_s: float
    pool_per_cpu_s: float


async def measure_one(folder: Path, scratch: Path, log_file: Path, *, round_count: int) -> list[Rates]:
    """Ask both servers the same, in turns."""
    found: list[Rates] = []
    plain_server = ServerProcess(
        model=str(folder), cache_directory=scratch / "plain", log_file=log_file.with_suffix(".plain.log")
    )
    most = max(STREAM_COUNTS)
    async with contextlib.AsyncExitStack() as stack:
        plain = stack.enter_context(plain_server)
        pool = stack.enter_context(pool_process([folder], scratch, log_file=log_file))
        sides = {
            name: (process, await stack.enter_async_context(connected(process.address, most)))
            for name, process in (("plain", plain), ("pool", pool))
        }
        # One round more than is kept: the first one warms both servers up.
        for number, count in itertools.product(range(round_count + 1), STREAM_COUNTS):
            rates = {}
            for side in sorted(sides, reverse=bool(number % 2)):
                process, clients = sides[side]
                before_s = cpu_s(process.process_id)
                found_round = measure(await _decode(clients[:count], seed=number))
                used_s = cpu_s(process.process_id) - before_s
                rates[side] = found_round.tokens_per_s
                rates[f"{side}_per_cpu_s"] = found_round.token_count / used_s
            if number:
                found.append(Rates(count, **rates))
                console.print(
                    f"{count} streams: {rates['plain']:.1f} tokens/s plain, {rates['pool']:.1f} pool"
                )
    return found


async def _decode(clients: Sequence[Client], *, seed: int) -> list[Reply]:
    requests = []
    for number, _ in enumerate(clients):
        ids = [10 + (7 * seed + 13 * number + place * place) % 240 for place in range(_PROMPT_TOKEN_COUNT)]
        requests.append(token_request(ids, max_output_tokens=_OUTPUT_TOKEN_COUNT, cache=NO_CACHE))
    return await stream_together(clients, requests)


def one_verdicts(found: Sequence[Rates]) -> list[Verdict]:
    """Return what is left of a plain server's rate."""
    verdicts = []
    for count in STREAM_COUNTS:
        own = [rates for rates in found if rates.stream_count == count]
        for what, compared in (
            ("second", ratios([r.pool for r in own], [r.plain for r in own])),
            # Which says more where other programs take turns on the cores.
            ("CPU second", ratios([r.pool_per_cpu_s for r in own], [r.plain_per_cpu_s for r in own])),
        ):
            name = f"tokens per {what} of {count} streams, pool of one / plain"
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
