"""Memory of a crowd: the peak of MLX's own counter above the weights, against the KV of the rows themselves.

The server's `EngineStats.peak_memory_bytes` is `mx.get_peak_memory()` since its warm-up, so a server of its
own is started; weights and KV bytes per token are what it says of its model. It is asked while all rows
decode: rows that end while others are still to be prefilled would never be in memory together.
"""

from __future__ import annotations

from bench.cases.figure import MEMORY_RATIO, Figure, FigureKey, Unit
from bench.cases.rows import decoding_rows
from bench.cases.target import MEMORY
from bench.cases.testbed import Testbed

ROW_COUNT = 8


async def measure_memory(testbed: Testbed, *, round_index: int) -> list[Figure]:
    """Let eight prompts of middle length arrive together at a fresh server; look when all of them decode."""
    sizes = testbed.sizes
    prompts = testbed.prompts.take_each((sizes.middle_prompt_token_count,) * ROW_COUNT)
    folder = f"memory-{round_index}"
    async with testbed.server(folder=folder, client_count=ROW_COUNT, flags=("--no-cache",)) as clients:
        rows = decoding_rows(
            clients,
            prompts,
            max_output_tokens=sizes.row_output_token_limit,
            step_count=sizes.mix_output_token_count,
        )
        async with rows as heard:
            engine = (await clients[0].stats()).engine
            token_count = sum(map(len, prompts)) + sum(map(len, heard))
    return figures_of(
        peak_bytes=engine.peak_memory_bytes,
        weight_bytes=testbed.model.weight_bytes,
        kv_bytes=token_count * testbed.model.kv_bytes_per_token,
    )


def figures_of(*, peak_bytes: int, weight_bytes: int, kv_bytes: int) -> list[Figure]:
    """Return the ratio and what it is made of."""
    return [
        Figure(FigureKey(MEMORY, MEMORY_RATIO), (peak_bytes - weight_bytes) / kv_bytes),
        Figure(FigureKey(MEMORY, "peak above weights", unit=Unit.BYTES), float(peak_bytes - weight_bytes)),
        Figure(FigureKey(MEMORY, "the rows' own KV", unit=Unit.BYTES), float(kv_bytes)),
    ]
