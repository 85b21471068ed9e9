"""Decode beside pictures: the effect of new pictures, one after another, on the gaps between others' tokens.

One stream, and four, decode with the cache off. Each round times their gaps alone, beside the pictures, and
alone again, so that the cost of their growing contexts falls on both sides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bench.cases.rows import decoding_rows
from bench.cases.testbed import REPLY_TIMEOUT_S
from bench.grpc_clients import Client, connected
from bench.prompts import FreshPrompts, short_prompts
from bench.replies import Reply, gaps_inside, gaps_overlapping, quantile
from bench.report import Spread, console, ratios, spread_of
from bench.server_process import ServerProcess
from bench.vision_model import IMAGE_TOKEN_COUNT, picture
from bench.vision_ttft import picture_request

STREAM_COUNTS = (1, 4)
GAP_LIMIT = 2.2
"""Limit of p99 between tokens beside pictures over p50 of decode alone: as for decode beside a prefill."""
_STREAM_TOKEN_COUNT = 40
_STREAM_OUTPUT_LIMIT = 3000
"""Output limit of the streams, which are cancelled before they reach it."""
_FIRST_STEPS = 16
_QUESTION = "What is it?"
_FIRST_SEED = 10_000
"""First seed of the pictures, so that they differ from those of the bench's other part."""
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class BesideSizes:
    """Sizes of a round."""

    picture_count: int = 6
    alone_step_count: int = 128
    """Steps of each of the two stretches alone; both have over a hundred gaps for each stream."""


FULL = BesideSizes()
QUICK = BesideSizes(picture_count=2, alone_step_count=24)


@dataclasses.dataclass(frozen=True, slots=True)
class Gaps:
    """Times between two tokens of so many streams in one round, in seconds."""

    stream_count: int
    alone_p50_s: float
    alone_p99_s: float
    beside_p50_s: float
    beside_p99_s: float
    beside_count: int
    """How many gaps there were beside the pictures."""
    picture_s: float
    """Median time to the first token after a picture beside the streams."""
    picture_alone_s: float


async def measure_beside(
    model_path: Path, scratch: Path, log_file: Path, round_count: int, sizes: BesideSizes = FULL
) -> list[Gaps]:
    """Return one entry for each round and number of streams, after a round that warms up."""
    server = ServerProcess(model=str(model_path), cache_directory=scratch / "beside", log_file=log_file)
    found: list[Gaps] = []
    pictures = (picture(seed) for seed in itertools.count(_FIRST_SEED))
    with server:
        async with connected(server.address, max(STREAM_COUNTS) + 1) as clients:
            texts = short_prompts(64, seed=1)
            prompts = FreshPrompts([i for text in texts for i in await clients[0].tokenize(text)], seed=1)
            await _round(clients[:2], prompts, pictures, QUICK)
            for number in range(round_count):
                # The order alternates, so that a machine that becomes slower hits both alike.
                for count in STREAM_COUNTS if number % 2 == 0 else reversed(STREAM_COUNTS):
                    found.append(await _round(clients[: count + 1], prompts, pictures, sizes))
                console.print(f"decode beside pictures, round {number + 1} of {round_count}")
    return found


async def _round(
    clients: Sequence[Client], prompts: FreshPrompts, pictures: Iterator[bytes], sizes: BesideSizes
) -> Gaps:
    *stream_clients, picture_client = clients
    alone_s = (await _show(picture_client, pictures)).ttft_s
    async with decoding_rows(
        stream_clients,
        prompts.take_each((_STREAM_TOKEN_COUNT,) * len(stream_clients)),
        max_output_tokens=_STREAM_OUTPUT_LIMIT,
        step_count=_FIRST_STEPS,
        ignore_end_tokens=True,
    ) as heard:
        async with _stretch(heard) as before:
            await _steps(heard, sizes.alone_step_count)
        replies = [await _show(picture_client, pictures) for _ in range(sizes.picture_count)]
        async with _stretch(heard) as after:
            await _steps(heard, sizes.alone_step_count)
    return gaps_of(heard, replies, alone=(tuple(before), tuple(after)), picture_alone_s=alone_s)


@asynccontextmanager
async def _stretch(heard: Sequence[Sequence[float]]) -> AsyncIterator[list[float]]:
    """Yield a list that will have the begin and the end of the block, as times of the latest token."""
    ends = [max(times[-1] for times in heard)]
    yield ends
    ends.append(max(times[-1] for times in heard))


async def _steps(heard: Sequence[Sequence[float]], count: int) -> None:
    """Wait until every stream has so many more tokens."""
    wanted = [len(times) + count for times in heard]
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        while any(len(times) < least for times, least in zip(heard, wanted, strict=True)):
            await asyncio.sleep(_POLL_S)


async def _show(client: Client, pictures: Iterator[bytes]) -> Reply:
    """Ask a short question about a new picture; the reply is one token."""
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        reply, _, finished = await client.stream(
            picture_request(next(pictures), (_QUESTION,), max_output_tokens=1)
        )
    assert finished.usage.image_tokens >= IMAGE_TOKEN_COUNT, finished.usage.image_tokens
    return reply


def gaps_of(
    heard: Sequence[Sequence[float]],
    replies: Sequence[Reply],
    *,
    alone: Sequence[Sequence[float]],
    picture_alone_s: float,
) -> Gaps:
    """Return the streams' gaps in the stretches alone and beside the pictures; a picture's time is from its
    request to its first token."""
    without = [
        gap
        for start, stop in alone
        for times in heard
        for gap in gaps_inside(times, start_s=start, stop_s=stop)
    ]
    start, stop = replies[0].start_time_s, replies[-1].token_times_s[0]
    beside = [gap for times in heard for gap in gaps_overlapping(times, start_s=start, stop_s=stop)]
    return Gaps(
        stream_count=len(heard),
        alone_p50_s=quantile(without, 0.5),
        alone_p99_s=quantile(without, 0.99),
        beside_p50_s=quantile(beside, 0.5),
        beside_p99_s=quantile(beside, 0.99),
        beside_count=len(beside),
        picture_s=quantile([reply.ttft_s for reply in replies], 0.5),
        picture_alone_s=picture_alone_s,
    )


def gap_ratios(rounds: Sequence[Gaps]) -> dict[str, Spread]:
    """Return ratios taken round by round, by what they compare."""
    found: dict[str, Spread] = {}
    for count in sorted({gaps.stream_count for gaps in rounds}):
        mine = [gaps for gaps in rounds if gaps.stream_count == count]
        who = f"{count} stream{'s' if count > 1 else ''}"
        found[gap_name(count)] = _ratio(mine, "beside_p99_s", "alone_p50_s")
        found[f"{who}: p99 beside pictures / p99 alone"] = _ratio(mine, "beside_p99_s", "alone_p99_s")
        found[f"{who}: p50 beside pictures / p50 alone"] = _ratio(mine, "beside_p50_s", "alone_p50_s")
        found[f"{who}: first token of a picture, beside / alone"] = _ratio(
            mine, "picture_s", "picture_alone_s"
        )
    return found


def gap_name(stream_count: int) -> str:
    """Return the name of the ratio that has a target."""
    return f"{stream_count} stream{'s' if stream_count > 1 else ''}: p99 beside pictures / p50 alone"


def gap_seconds(rounds: Sequence[Gaps]) -> dict[str, Spread]:
    """Return the times, for orientation."""
    names = ("alone_p50_s", "alone_p99_s", "beside_p50_s", "beside_p99_s", "picture_s", "picture_alone_s")
    return {
        f"{count}: {name.removesuffix('_s').replace('_', ' ')}": spread_of(
            getattr(gaps, name) for gaps in rounds if gaps.stream_count == count
        )
        for count in sorted({gaps.stream_count for gaps in rounds})
        for name in names
    }


def _ratio(rounds: Sequence[Gaps], above: str, below: str) -> Spread:
    return ratios([getattr(gaps, above) for gaps in rounds], [getattr(gaps, below) for gaps in rounds])
