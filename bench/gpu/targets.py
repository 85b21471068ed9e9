"""Targets of a GPU: what the medians of `make bench CASE=gpu` must be and should be.

Taken on an H100 or H200 with the shape of Qwen3-4B in bfloat16, against mlx-lm's engine in process.
"""

from __future__ import annotations

from bench.cases.figure import (
    PREFILL_TIME_RATIO,
    RESTART_RATIO,
    TOKENS_PER_S_RATIO,
    WORST_TTFT_RATIO,
)
from bench.cases.target import Bound, Target

BESIDE = "16 rows beside 16,000"
RESTART = "SSD hit of 16,000"
START = "second start"
EXACT = "float32, TF32 off"

HIT_MS = "first token, ms"
ALONE_GAP_RATIO = "p99 between tokens / alone"
SERVING_S = "start to SERVING, s"
UNEQUAL = "replies unlike the engine's alone"

_PASSES_OF_A_HIT = 1.5
"""A hit computes one pass; the rest is for the way to the server and back."""
_LOADS_OF_A_START = 1.2


def ram_hit(token_count: int) -> str:
    """Return the name of a case that asks for a prompt again."""
    return f"RAM hit of {token_count:,}"


def targets(*, pass_ms: float, load_s: float) -> tuple[Target, ...]:
    """Return the table. `pass_ms` is a pass of one row, `load_s` what mlx-lm takes to load the model, both of
    this run; not a number where they were not measured."""
    hit_goal_ms, start_goal_s = _PASSES_OF_A_HIT * pass_ms, _LOADS_OF_A_START * load_s
    at_least, at_most = Bound.AT_LEAST, Bound.AT_MOST
    return (
        Target("1 client", TOKENS_PER_S_RATIO, 1.2, 1.5, at_least),
        Target("4 clients", TOKENS_PER_S_RATIO, 1.2, 1.6, at_least),
        Target("16 clients", TOKENS_PER_S_RATIO, 1.3, 1.8, at_least),
        Target("64 clients", TOKENS_PER_S_RATIO, 1.3, 2.2, at_least),
        Target("8 x 2,000", TOKENS_PER_S_RATIO, 1.0, 1.2, at_least),
        Target("32 x 1,000", TOKENS_PER_S_RATIO, 1.0, 1.5, at_least),
        Target("64 clients", WORST_TTFT_RATIO, 0.8, 0.5, at_most),
        Target("8 x 2,000", WORST_TTFT_RATIO, 1.0, 0.7, at_most),
        Target("lone 16,000", TOKENS_PER_S_RATIO, 1.0, 1.03, at_least),
        Target(ram_hit(2000), HIT_MS, 12.0, min(12.0, hit_goal_ms), at_most),
        Target(ram_hit(16_000), HIT_MS, 15.0, min(15.0, hit_goal_ms), at_most),
        Target(START, SERVING_S, 8.0, min(8.0, start_goal_s), at_most),
        Target(RESTART, RESTART_RATIO, 0.3, 0.15, at_most),
        Target(BESIDE, ALONE_GAP_RATIO, 2.2, 1.5, at_most),
        Target(BESIDE, PREFILL_TIME_RATIO, 2.0, 2.0, at_most),
        Target(EXACT, UNEQUAL, 0.0, 0.0, at_most),
    )
