"""Quantized KV: rows that decode with `--kv-bits 8`, beside the same in another tree when one is named.

Without a baseline there is nothing that the target's ratio could be taken to; the rate stands alone.
"""

from __future__ import annotations

import contextlib

from bench.cases.figure import BASELINE_RATIO, Figure, FigureKey, Unit
from bench.cases.target import KV_BITS
from bench.cases.testbed import Testbed
from bench.replies import measure

ROW_COUNT = 16
_FLAGS = ("--kv-bits", "8")
_OWN, _BASELINE = "this tree", "baseline"


async def measure_kv_bits(testbed: Testbed, *, round_index: int) -> list[Figure]:
    """Serve the same prompts with quantized KV from this tree and from the baseline's, in turn."""
    sizes = testbed.sizes
    commands = {_OWN: (), **({_BASELINE: testbed.baseline} if testbed.baseline else {})}
    prompts = testbed.prompts.take_each((sizes.short_prompt_token_count,) * ROW_COUNT)
    rates: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        for tree in sorted(commands, reverse=bool(round_index % 2)):
            clients = await stack.enter_async_context(
                testbed.server(
                    folder=f"kv-bits-{tree.split()[0]}-{round_index}",
                    client_count=ROW_COUNT,
                    flags=_FLAGS,
                    command=commands[tree],
                )
            )
            await testbed.warm_up(clients)
            replies = await testbed.ask(clients, prompts, sizes.short_output_token_count)
            rates[tree] = measure(replies).tokens_per_s
    return figures_of(rates)


def figures_of(rates: dict[str, float]) -> list[Figure]:
    """Return the rates, and their ratio where there are two."""
    figures = [
        Figure(FigureKey(KV_BITS, f"tokens/s, {tree}", unit=Unit.TOKENS_PER_S), rate)
        for tree, rate in rates.items()
    ]
    if _BASELINE in rates:
        figures.append(Figure(FigureKey(KV_BITS, BASELINE_RATIO), rates[_OWN] / rates[_BASELINE]))
    return figures
