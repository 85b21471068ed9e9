"""Closed loop: callers who send their next prompt when the last reply ended, and how unequal they fare."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

from icehouse.v1 import inference_service_pb2 as messages

from bench.cases.figure import TTFT_TAIL_RATIO, Figure, FigureKey, Unit
from bench.cases.target import CLOSED_LOOP
from bench.cases.testbed import REPLY_TIMEOUT_S, Testbed
from bench.grpc_clients import Client, token_request
from bench.replies import quantile

CLIENT_COUNT = 16
LEAST_TOKEN_COUNT, MOST_TOKEN_COUNT = 20, 80
OUTPUT_COUNT = 4


async def measure_closed_loop(testbed: Testbed, *, seed: int) -> list[Figure]:
    """Send so many prompts of drawn lengths, cache off; the first of each client waits for all the others."""
    source = random.Random(seed)
    lengths = [
        source.randint(LEAST_TOKEN_COUNT, MOST_TOKEN_COUNT) for _ in range(testbed.sizes.loop_request_count)
    ]
    requests = iter(
        [
            token_request(prompt, max_output_tokens=OUTPUT_COUNT)
            for prompt in testbed.prompts.take_each(lengths)
        ]
    )
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        found = await asyncio.gather(*(_loop(c, requests) for c in testbed.clients[:CLIENT_COUNT]))
    return figures_of([ttft_s for ttfts_s in found for ttft_s in ttfts_s])


async def _loop(client: Client, requests: Iterator[messages.GenerateRequest]) -> list[float]:
    """Send what is left of the requests, which all clients take from, one after another."""
    ttfts_s = []
    for request in requests:
        reply, _, _ = await client.stream(request)
        ttfts_s.append(reply.ttft_s)
    return ttfts_s


def figures_of(ttfts_s: Sequence[float]) -> list[Figure]:
    """Return the tail's ratio to the median, and both."""
    p50_s, p99_s = quantile(ttfts_s, 0.5), quantile(ttfts_s, 0.99)
    return [
        Figure(FigureKey(CLOSED_LOOP, TTFT_TAIL_RATIO), p99_s / p50_s),
        Figure(FigureKey(CLOSED_LOOP, "p50 of first token", unit=Unit.SECONDS), p50_s),
        Figure(FigureKey(CLOSED_LOOP, "p99 of first token", unit=Unit.SECONDS), p99_s),
    ]
