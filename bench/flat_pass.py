"""Mechanics of the flat forward pass against mlx-lm's BatchGenerator, both called in this process.

Wall clock from the first request to the last token, prompts included, in alternating rounds, with a trivial
greedy scheduler: decoding rows first, then prompt chunks while a budget of tokens lasts. No sampling, no
prefix cache, no server: it measures only the mechanics. On a CPU, preload OpenBLAS, which multiplies matrices
several times as fast as MLX's own build.

`--host` measures instead how long Python takes to build one decode pass, which a GPU would wait for.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from icehouse_server.engine.runner.forward.forward_pass import ForwardPass
from icehouse_server.engine.runner.forward.row import Row, Share
from mlx_lm import load
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from bench.random_model import RandomModel, make_random_model
from tests.fixtures.models.at_once import examine

CASES = {
    "1 x 40": ([40] * 1, 48),
    "4 x 40": ([40] * 4, 48),
    "16 x 40": ([40] * 16, 48),
    "64 x 40": ([40] * 64, 48),
    "15 x 40 + 1 x 2000": ([40] * 15 + [2000], 32),
    "8 x 500": ([500] * 8, 32),
}
"""Lengths of the prompts, and the output tokens of each row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One side of one round."""

    tokens_per_s: float
    worst_first_token_s: float
    cpu_s: float
    """CPU time of this process, which a busy machine disturbs less than the wall clock."""
    replies: list[list[int]]


@dataclasses.dataclass(slots=True)
class _Request:
    row: Row
    todo: list[int]
    drawn: list[int] = dataclasses.field(default_factory=list)
    first_token_s: float = 0.0


def prompts_of(lengths: Sequence[int], vocabulary_size: int) -> list[list[int]]:
    """Return prompts of random tokens, the same ones for the same lengths."""
    draw = random.Random(len(lengths) * 10_000 + max(lengths))
    return [[draw.randrange(10, vocabulary_size) for _ in range(length)] for length in lengths]


def run_flat(model: Any, forward: ForwardPass, prompts: list[list[int]], count: int, *, budget: int) -> Run:
    """Run all prompts through passes of at most `budget` tokens beyond the decoding rows."""
    began, cpu_began = time.perf_counter(), time.process_time()
    everyone = [_Request(Row(make_prompt_cache(model)), list(prompt)) for prompt in prompts]
    waiting = list(everyone)
    while waiting:
        _step(forward, waiting, budget, began)
        for ended in [one for one in waiting if len(one.drawn) == count]:
            ended.row.leave_group()
            waiting.remove(ended)
    took = time.perf_counter() - began
    return Run(
        len(prompts) * count / took,
        max(one.first_token_s for one in everyone),
        time.process_time() - cpu_began,
        [one.drawn for one in everyone],
    )


def _step(forward: ForwardPass, waiting: Sequence[_Request], budget: int, began: float) -> None:
    fed: list[tuple[_Request, int]] = [(one, 1) for one in waiting if one.drawn]
    room = budget
    for one in waiting:
        if not one.drawn and room > 0:
            fed.append((one, min(room, len(one.todo))))
            room -= fed[-1][1]
    ids = [token for one, count in fed for token in one.todo[:count]]
    shares = [Share(one.row, count, logit_count=int(count == len(one.todo))) for one, count in fed]
    output = forward.run(mx.array(ids), shares)
    drawn = mx.argmax(output.logits, axis=-1) if output.logits is not None else None
    mx.eval(output.arrays, drawn)
    now = time.perf_counter() - began
    tokens: Any = drawn.tolist() if drawn is not None else []
    for (one, count), (first, last) in zip(fed, output.logit_spans, strict=True):
        if first == last:
            one.todo = one.todo[count:]
            continue
        one.first_token_s = one.first_token_s or now
        one.drawn.append(tokens[first])
        one.todo = [tokens[first]]


def run_upstream(model: Any, prompts: list[list[int]], count: int) -> Run:
    """Run all prompts through mlx-lm's batches, with its own scheduler."""
    engine = BatchGenerator(
        model, max_tokens=count, completion_batch_size=64, prefill_batch_size=8, prefill_step_size=512
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    uids = engine.insert(prompts)
    replies: dict[int, list[int]] = {uid: [] for uid in uids}
    first_token_s: dict[int, float] = {}
    ended = 0
    while ended < len(prompts):
        for response in engine.next()[1]:
            first_token_s.setdefault(response.uid, time.perf_counter() - began)
            replies[response.uid].append(response.token)
            ended += response.finish_reason is not None
    took = time.perf_counter() - began
    return Run(
        sum(map(len, replies.values())) / took,
        max(first_token_s.values()),
        time.process_time() - cpu_began,
        [replies[uid] for uid in uids],
    )


def compare(model: Any, *, rounds: int, budget: int, names: Sequence[str]) -> None:
    """Print each case's medians, and the median of the rounds' ratios."""
    forward = ForwardPass(model, examine(model))
    vocabulary_size = model.args.vocab_size
    print(f"ways: {[mode.value for mode in forward.facts.modes]}, tokens of prompts in a pass: {budget}")
    for name in names:
        lengths, count = CASES[name]
        prompts = prompts_of(lengths, vocabulary_size)
        pairs = []
        for number in range(rounds + 1):
            done = {}
            for side in (0, 1) if number % 2 else (1, 0):
                done[side] = (
                    run_upstream(model, prompts, count)
                    if side
                    else run_flat(model, forward, prompts, count, budget=budget)
                )
            if number:  # the first round warms up
                pairs.append((done[0], done[1]))
        rate = [statistics.median(pair[side].tokens_per_s for pair in pairs) for side in (0, 1)]
        first = [statistics.median(pair[side].worst_first_token_s for pair in pairs) for side in (0, 1)]
        ratios = sorted(ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs)
        cpu = statistics.median(ours.cpu_s / theirs.cpu_s for ours, theirs in pairs)
        ours, theirs = pairs[-1]
        equal = sum(a == b for a, b in zip(ours.replies, theirs.replies, strict=True))
        print(
            f"{name:20} tok/s {rate[0]:6.1f} of {rate[1]:6.1f}: ratio {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}), CPU time {cpu:.2f}; "
            f"worst first token {first[0]:.2f} s of {first[1]:.2f} s; "
            f"equal replies {equal} of {len(lengths)}",
            flush=True,
        )


def measure_host(model: Any, *, row_counts: Sequence[int], pass_count: int = 20) -> None:
    """Print how long it takes to build a decode pass, and to compute it."""
    facts = examine(model)
    for row_count in row_counts:
        forward = ForwardPass(model, facts)
        rows = [Row(make_prompt_cache(model)) for _ in range(row_count)]
        for row in rows:
            mx.eval(forward.run(mx.array([11] * 20), [Share(row, 20)]).arrays)
        shares = [Share(row, 1, logit_count=1) for row in rows]
        tokens = mx.array([12] * row_count)
        spent, computed = [], []
        for _ in range(pass_count):
            began = time.perf_counter()
            output = forward.run(tokens, shares)
            spent.append(time.perf_counter() - began)
            mx.eval(output.arrays)
            computed.append(time.perf_counter() - began - spent[-1])
        built = statistics.median(spent)
        layers = len(model.layers)
        print(
            f"{row_count:3} rows: {built * 1e3:6.2f} ms to build {layers} layers, "
            f"{built / row_count / layers * 1e6:.1f} us for each row and layer; "
            f"{statistics.median(computed) * 1e3:.1f} ms to compute it",
            flush=True,
        )


def main() -> None:
    """Compare the passes, or measure the host."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder; random weights if none is named")
    parser.add_argument("--which", choices=[which.value for which in RandomModel], default="large")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--host", action="store_true", help="time the building of one pass instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or make_random_model(Path(folder), which=RandomModel(arguments.which))
        model: Any = load(str(path))[0]
        if arguments.host:
            measure_host(model, row_counts=(1, 16, 64))
        else:
            compare(model, rounds=arguments.rounds, budget=arguments.budget, names=arguments.cases)


if __name__ == "__main__":
    main()
