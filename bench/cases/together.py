"""Arrivals together: prompts that come at the same moment, served and computed in process, in turn.

Wall clock from the first request to the last token, prompts included; times to first token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from bench.cases import target
from bench.cases.figure import (
    DECODE_RATIO,
    MEDIAN_TTFT_RATIO,
    TOKENS_PER_S_RATIO,
    WORST_TTFT_RATIO,
    Figure,
    FigureKey,
    Side,
    Unit,
)
from bench.cases.sizes import Sizes
from bench.cases.testbed import Testbed
from bench.grpc_clients import NO_CACHE, READ_WRITE
from bench.replies import Reply, RoundMetrics, measure

_CLIENTS = {1: target.LONE, 4: target.FEW, 16: target.MANY, 64: target.CROWD}
RATE, DECODE_RATE = "tokens/s", "decode alone, tokens/s"
WORST_TTFT, MEDIAN_TTFT, GAP_P99 = "worst first token", "median first token", "p99 between tokens"
EQUAL_REPLIES = "replies equal to the engine's"


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """Prompts that come at the same moment."""

    case: str
    prompt_token_counts: tuple[int, ...]
    max_output_tokens: int
    repeat_count: int = 1
    """How often a round measures it."""


def arrivals_of_clients(sizes: Sizes) -> list[Arrivals]:
    """Return the cases of so many clients with a short prompt each."""
    return [
        Arrivals(
            _CLIENTS.get(count, f"{count} clients"),
            (sizes.short_prompt_token_count,) * count,
            sizes.short_output_token_count,
            repeat_count=sizes.lone_repeat_count if count == 1 else 1,
        )
        for count in sizes.client_counts
    ]


def arrivals_of_mixes(sizes: Sizes) -> list[Arrivals]:
    """Return the case of a long prompt among short ones, and that of eight of middle length."""
    short = (sizes.short_prompt_token_count,) * 15
    return [
        Arrivals(
            target.LONG_AMONG_SHORT, (*short, sizes.long_prompt_token_count), sizes.mix_output_token_count
        ),
        Arrivals(target.MIDDLE, (sizes.middle_prompt_token_count,) * 8, sizes.mix_output_token_count),
    ]


async def measure_arrivals(
    testbed: Testbed, arrivals: Arrivals, *, sides: Sequence[Side], turn: int
) -> list[Figure]:
    """Measure one case on the engine and on `sides`, in an order that turns from round to round."""
    figures: list[Figure] = []
    for repeat in range(arrivals.repeat_count):
        prompts = testbed.prompts.take_each(arrivals.prompt_token_counts)
        replies: dict[Side, list[Reply]] = {}
        for side in in_turn((Side.ENGINE, *sides), turn + repeat):
            if side is Side.ENGINE:
                replies[side] = await testbed.call(prompts, arrivals.max_output_tokens)
                continue
            use = READ_WRITE if side is Side.CACHE_ON else NO_CACHE
            replies[side] = await testbed.ask(testbed.clients, prompts, arrivals.max_output_tokens, use=use)
        figures += figures_of(arrivals.case, replies)
    return figures


def in_turn(sides: Sequence[Side], turn: int) -> tuple[Side, ...]:
    """Return the sides in an order in which another one comes first each turn."""
    first = turn % len(sides)
    return (*sides[first:], *sides[:first])


def figures_of(case: str, replies: dict[Side, list[Reply]]) -> Iterator[Figure]:
    """Return the ratios of each side to the engine, and the numbers of each side."""
    metrics = {side: measure(found) for side, found in replies.items()}
    engine = metrics[Side.ENGINE]
    for side, found in metrics.items():
        yield from _numbers(case, side, found)
        if side is Side.ENGINE:
            continue
        compared = {
            TOKENS_PER_S_RATIO: found.tokens_per_s / engine.tokens_per_s,
            WORST_TTFT_RATIO: found.ttft_worst_s / engine.ttft_worst_s,
            MEDIAN_TTFT_RATIO: found.ttft_p50_s / engine.ttft_p50_s,
        }
        if found.decode_tokens_per_s and engine.decode_tokens_per_s:
            compared[DECODE_RATIO] = found.decode_tokens_per_s / engine.decode_tokens_per_s
        pairs = zip(replies[side], replies[Side.ENGINE], strict=True)
        equal_count = sum(a.token_ids == b.token_ids for a, b in pairs)
        compared[EQUAL_REPLIES] = equal_count / len(replies[side])
        yield from (Figure(FigureKey(case, name, side), value) for name, value in compared.items())


def _numbers(case: str, side: Side, found: RoundMetrics) -> Iterator[Figure]:
    seconds = {WORST_TTFT: found.ttft_worst_s, MEDIAN_TTFT: found.ttft_p50_s, GAP_P99: found.itl_p99_s}
    rates = {RATE: found.tokens_per_s, DECODE_RATE: found.decode_tokens_per_s}
    for name, value in seconds.items():
        yield Figure(FigureKey(case, name, side, Unit.SECONDS), value)
    for name, rate in rates.items():
        if rate is not None:
            yield Figure(FigureKey(case, name, side, Unit.TOKENS_PER_S), rate)
