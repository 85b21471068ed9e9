"""Beside: the gaps between tokens of a model while another one is loaded and unloaded, over and over."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from icehouse.v1 import model_service_pb2 as models

from bench.grpc_clients import NO_CACHE, Client, connected, stream_together, token_request
from bench.models.served import pool_process
from bench.replies import Reply, quantile
from bench.report import Verdict, console, show_table, spread_of

STREAM_COUNTS = (1, 8)
P99_TARGET = 2.0
_OUTPUT_TOKEN_COUNT = 96
_PROMPT_TOKEN_COUNT = 24


@dataclasses.dataclass(frozen=True, slots=True)
class GapTimes:
    """The gaps of all streams of one round, in seconds."""

    stream_count: int
    alone_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    load_count: int
    """How often the other model was loaded and unloaded meanwhile."""


async def measure_beside(
    folders: Sequence[Path], scratch: Path, log_file: Path, *, round_count: int
) -> list[GapTimes]:
    """Decode with the first model, in turns alone and while the second one comes and goes."""
    found: list[GapTimes] = []
    with pool_process(folders, scratch, log_file=log_file) as server:
        async with connected(server.address, max(STREAM_COUNTS) + 1) as (other, *clients):
            await _come_and_go(other, folders[1].name)
            for number, count in itertools.product(range(round_count), STREAM_COUNTS):
                alone: list[Reply] = []
                beside: list[Reply] = []
                load_count = 0
                for is_beside in (False, True) if number % 2 else (True, False):
                    if is_beside:
                        beside, load_count = await _beside(other, clients[:count], folders, seed=number)
                    else:
                        alone = await _decode(clients[:count], folders[0], seed=number)
                found.append(GapTimes(count, _gaps_s(alone), _gaps_s(beside), load_count))
                console.print(
                    f"{count} streams: p99 {_p99(found[-1].alone_s):.3f} s alone, "
                    f"{_p99(found[-1].beside_s):.3f} s beside {load_count} loads"
                )
    return found


async def _beside(
    other: Client, clients: Sequence[Client], folders: Sequence[Path], *, seed: int
) -> tuple[list[Reply], int]:
    """Return the replies, and how often the other model came and went."""
    decoding = asyncio.create_task(_decode(clients, folders[0], seed=seed))
    count = 0
    while not decoding.done():
        await _come_and_go(other, folders[1].name)
        count += 1
    return await decoding, count


async def _come_and_go(client: Client, name: str) -> None:
    async for _ in client.models.LoadModel(models.LoadModelRequest(model=name)):
        pass
    await client.models.UnloadModel(models.UnloadModelRequest(model=name))


async def _decode(clients: Sequence[Client], folder: Path, *, seed: int) -> list[Reply]:
    requests = []
    for number, _ in enumerate(clients):
        ids = [10 + (7 * seed + 13 * number + place * place) % 240 for place in range(_PROMPT_TOKEN_COUNT)]
        requests.append(token_request(ids, max_output_tokens=_OUTPUT_TOKEN_COUNT, cache=NO_CACHE))
        requests[-1].model = folder.name
    return await stream_together(clients, requests)


def _gaps_s(replies: Sequence[Reply]) -> tuple[float, ...]:
    return tuple(b - a for reply in replies for a, b in itertools.pairwise(reply.token_times_s))


def _p99(gaps_s: Sequence[float]) -> float:
    return quantile(gaps_s, 0.99)


def beside_verdicts(found: Sequence[GapTimes]) -> list[Verdict]:
    """Return how much longer the longest gaps become."""
    verdicts = []
    for count in STREAM_COUNTS:
        alone_s, beside_s = _all_gaps_s(found, count)
        # Of one round it is its longest gap or two: on a busy machine that of all rounds together says more.
        compared = spread_of([_p99(beside_s) / _p99(alone_s)])
        name = f"gaps of {count} streams beside loads / alone, p99 of all rounds"
        verdicts.append(Verdict(name, compared, P99_TARGET, at_least=False))
    return verdicts


def _all_gaps_s(found: Sequence[GapTimes], stream_count: int) -> tuple[list[float], list[float]]:
    """Return the gaps of all rounds, alone and beside."""
    own = [times for times in found if times.stream_count == stream_count]
    return [gap for times in own for gap in times.alone_s], [gap for times in own for gap in times.beside_s]


def show_beside(found: Sequence[GapTimes]) -> None:
    """Print the gaps of all rounds together."""
    rows = []
    for count in STREAM_COUNTS:
        for name, gaps in zip(("alone", "beside loads"), _all_gaps_s(found, count), strict=True):
            numbers = (quantile(gaps, 0.5), _p99(gaps), max(gaps))
            rows.append((f"{count} streams, {name}", *(f"{1000 * number:.0f}" for number in numbers)))
    show_table("Milliseconds between two tokens, all rounds", ("", "p50", "p99", "longest"), rows)
    loads = spread_of(float(times.load_count) for times in found)
    console.print(f"loads and unloads beside a round: {loads.text(0)}")
