"""Decode beside a prefill: what eight rows and one long prompt cost each other, cache off."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cases.figure import GAP_RATIO, PREFILL_TIME_RATIO, Figure, FigureKey, Unit
from bench.cases.rows import decoding_rows
from bench.cases.target import BESIDE
from bench.cases.testbed import Testbed
from bench.grpc_clients import token_request
from bench.replies import gaps_inside, gaps_overlapping, quantile

ROW_COUNT = 8


async def measure_beside(testbed: Testbed) -> list[Figure]:
    """Time a prompt alone, then beside rows whose gaps are timed before it and meanwhile."""
    sizes = testbed.sizes
    alone_s = await testbed.ttft_s(testbed.clients[0], testbed.prompts.take(sizes.beside_prompt_token_count))
    *row_clients, long_client = testbed.clients[: ROW_COUNT + 1]
    rows = decoding_rows(
        row_clients,
        testbed.prompts.take_each((sizes.short_prompt_token_count,) * ROW_COUNT),
        max_output_tokens=sizes.row_output_token_limit,
        step_count=sizes.alone_step_count,
    )
    async with rows as heard:
        prompt = testbed.prompts.take(sizes.beside_prompt_token_count)
        reply, _, _ = await long_client.stream(token_request(prompt, max_output_tokens=1))
    return figures_of(
        heard, start_s=reply.start_time_s, stop_s=reply.token_times_s[0], prefill_alone_s=alone_s
    )


def figures_of(
    heard: Sequence[Sequence[float]], *, start_s: float, stop_s: float, prefill_alone_s: float
) -> list[Figure]:
    """Return what the rows' token times say of a prefill that lasted from `start_s` to `stop_s`."""
    all_decode_s = max(times[0] for times in heard)
    alone = [gap for times in heard for gap in gaps_inside(times, start_s=all_decode_s, stop_s=start_s)]
    beside = [gap for times in heard for gap in gaps_overlapping(times, start_s=start_s, stop_s=stop_s)]
    p50_s, p99_s = quantile(alone, 0.5), quantile(beside, 0.99)
    seconds = {
        "p50 between tokens, decode alone": p50_s,
        "p99 between tokens, beside the prefill": p99_s,
        "prefill alone": prefill_alone_s,
        "prefill beside the rows": stop_s - start_s,
    }
    return [
        Figure(FigureKey(BESIDE, GAP_RATIO), p99_s / p50_s),
        Figure(FigureKey(BESIDE, PREFILL_TIME_RATIO), (stop_s - start_s) / prefill_alone_s),
        *(Figure(FigureKey(BESIDE, name, unit=Unit.SECONDS), value) for name, value in seconds.items()),
    ]
