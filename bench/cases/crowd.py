"""Crowds on cached prompts: eight on one system prompt, and eight long ones, cold and after a restart.

A server of its own is stopped with its blocks written to SSD, and started again in the same folder. The
system may still have the files in its page cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.cases.figure import CROWD_RATIO, RESTART_RATIO, Figure, FigureKey, Unit
from bench.cases.target import RESTART_HITS, SHARED_PROMPT
from bench.cases.testbed import Testbed
from bench.grpc_clients import READ_WRITE, Client

CROWD_COUNT = 8
_OUTPUT_COUNT = 4
_FLAGS = ("--flush-timeout-s", "60")
"""Let all of RAM reach the SSD at the stop."""


async def measure_crowds(testbed: Testbed, *, round_index: int) -> list[Figure]:
    """Ask both crowds before a restart and after it; one prompt alone first."""
    sizes = testbed.sizes
    system_prompt = testbed.prompts.take(sizes.system_prompt_token_count)
    sharing = [
        [*system_prompt, *own]
        for own in testbed.prompts.take_each((sizes.own_prompt_token_count,) * CROWD_COUNT)
    ]
    lone = testbed.prompts.take(sizes.system_prompt_token_count + sizes.own_prompt_token_count)
    others = testbed.prompts.take_each((sizes.restart_prompt_token_count,) * CROWD_COUNT)
    folder = f"crowd-{round_index}"
    async with testbed.server(folder=folder, client_count=CROWD_COUNT, flags=_FLAGS) as clients:
        await testbed.warm_up(clients, use=READ_WRITE)
        lone_s = await testbed.ttft_s(clients[0], lone, use=READ_WRITE)
        shared_cold_s = await _worst_ttft_s(testbed, clients, sharing)
        others_cold_s = await _worst_ttft_s(testbed, clients, others)
    async with testbed.server(folder=folder, client_count=CROWD_COUNT, flags=_FLAGS) as clients:
        await testbed.warm_up(clients, use=READ_WRITE)
        shared_restart_s = await _worst_ttft_s(testbed, clients, sharing)
        others_restart_s = await _worst_ttft_s(testbed, clients, others)
        ssd_token_count = (await clients[0].stats()).cache.lookups.ssd_token_total
    testbed.drop(folder)
    return [
        Figure(FigureKey(SHARED_PROMPT, CROWD_RATIO), shared_cold_s / lone_s),
        Figure(FigureKey(SHARED_PROMPT, RESTART_RATIO), shared_restart_s / shared_cold_s),
        Figure(FigureKey(RESTART_HITS, RESTART_RATIO), others_restart_s / others_cold_s),
        *_seconds(SHARED_PROMPT, alone=lone_s, cold=shared_cold_s, restarted=shared_restart_s),
        *_seconds(RESTART_HITS, cold=others_cold_s, restarted=others_restart_s),
        Figure(
            FigureKey(RESTART_HITS, "tokens from SSD, both crowds", unit=Unit.TOKENS), float(ssd_token_count)
        ),
    ]


async def _worst_ttft_s(
    testbed: Testbed, clients: Sequence[Client], prompts: Sequence[Sequence[int]]
) -> float:
    replies = await testbed.ask(clients, prompts, _OUTPUT_COUNT, use=READ_WRITE)
    return max(reply.ttft_s for reply in replies)


def _seconds(case: str, **worst_s: float) -> list[Figure]:
    return [
        Figure(FigureKey(case, f"worst first token, {name}", unit=Unit.SECONDS), value)
        for name, value in worst_s.items()
    ]
