"""`make bench CASE=lone`: cold time to first token of a lone prompt, the server against the engine.

Each round starts a new server, whose first request has five tokens, like a probe's: what the server learns
from that must not slow down later requests. Then come prompts of rising length: with the cache on, with it
off, and in mlx-lm's BatchGenerator (its default prefill step unless told otherwise), in an order that rotates
from round to round. One side computes at a time; every prompt is new to the server; all run with OpenBLAS if
the server would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import enum
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.engine_process import EngineProcess, EngineSizes
from bench.grpc_clients import NO_CACHE, READ_WRITE, Client, token_request
from bench.model_folder import model_path
from bench.prompts import short_prompts
from bench.replies import Reply
from bench.report import (
    OUT,
    Verdict,
    console,
    ratios,
    setting,
    show_table,
    show_verdicts,
    spread_of,
    write_json,
)
from bench.server_process import ServerProcess

TTFT_RATIO_TARGET = 1.1
CACHE_RATIO_TARGET = 1.05
FIRST_TOKEN_COUNT = 5
_TOKENS_PER_TEXT = 20
"""Least tokens of one of `short_prompts`."""


class Side(enum.Enum):
    """The side that computes a prompt."""

    ENGINE = "engine"
    CACHE_OFF = "server, cache off"
    CACHE_ON = "server, cache on"


_TURNS = tuple(Side)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    round_count: int
    prompt_token_counts: tuple[int, ...]


FULL = Plan(round_count=5, prompt_token_counts=(1059, 3000, 6000))
QUICK = Plan(round_count=2, prompt_token_counts=(1059, 3000))


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one prompt on one side."""

    round_index: int
    prompt_token_count: int
    side: Side
    ttft_s: float


def main() -> None:
    """Measure, print the tables, write bench/out/lone.json."""
    parser = argparse.ArgumentParser(prog="make bench CASE=lone", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds without the longest prompt")
    parser.add_argument("--model", default="random", help="random, or as for icehouse serve")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the prompts")
    parser.add_argument("--engine-step", type=int, default=0, help="tokens of a prefill step of the engine")
    parser.add_argument("--serve-flags", default="", help="more flags for icehouse serve, in one string")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    plan = dataclasses.replace(
        plan,
        round_count=arguments.rounds or plan.round_count,
        prompt_token_counts=tuple(arguments.tokens or plan.prompt_token_counts),
    )
    began = time.monotonic()
    found = asyncio.run(
        _measure(arguments.model, plan, arguments.serve_flags.split(), engine_step=arguments.engine_step)
    )
    _report(found, plan, engine_step=arguments.engine_step, duration_s=time.monotonic() - began)


async def _measure(model: str, plan: Plan, flags: Sequence[str], *, engine_step: int) -> list[Measured]:
    OUT.mkdir(parents=True, exist_ok=True)
    log_file = OUT / "lone.log"
    log_file.unlink(missing_ok=True)
    found: list[Measured] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="icehouse-bench-")))
        path = model_path(model, scratch)
        engine: EngineProcess | None = None
        for round_index in range(plan.round_count):
            server = ServerProcess(
                model=str(path),
                cache_directory=scratch / f"blocks-{round_index}",
                log_file=log_file,
                flags=flags,
            )
            with server:
                client = Client(server.address)
                await client.ready()
                try:
                    if engine is None:
                        dtype = (await client.model()).dtype
                        engine = EngineProcess(
                            model_path=path,
                            dtype=dtype,
                            log_file=log_file,
                            sizes=EngineSizes(prefill_step_size=engine_step),
                        )
                        stack.enter_context(engine)
                        engine.generate([await _prompt(client, 100, seed=0)], max_output_tokens=1)
                    found += await _round(client, engine, plan, round_index)
                finally:
                    await client.close()
            console.print(f"round {round_index + 1} of {plan.round_count} done")
    return found


async def _round(client: Client, engine: EngineProcess, plan: Plan, round_index: int) -> list[Measured]:
    tiny = await _prompt(client, FIRST_TOKEN_COUNT, seed=1)
    await client.stream(token_request(tiny, max_output_tokens=1))
    found: list[Measured] = []
    for token_count in plan.prompt_token_counts:
        first = round_index % len(_TURNS)
        for side in _TURNS[first:] + _TURNS[:first]:
            prompt = await _prompt(client, token_count, seed=2 + len(found))
            reply = await _ask(client, engine, prompt, side)
            found.append(Measured(round_index, token_count, side, reply.ttft_s))
            console.print(f"{token_count} tokens, {side.value}: {reply.ttft_s:.2f} s")
    return found


async def _ask(client: Client, engine: EngineProcess, prompt: Sequence[int], side: Side) -> Reply:
    if side is Side.ENGINE:
        (reply,) = await asyncio.to_thread(engine.generate, [prompt], max_output_tokens=1)
        return reply
    cache = READ_WRITE if side is Side.CACHE_ON else NO_CACHE
    reply, started, _ = await client.stream(token_request(prompt, max_output_tokens=1, cache=cache))
    assert started.cache.cached_tokens == 0, "the prompt was not new to the server"
    return reply


async def _prompt(client: Client, token_count: int, *, seed: int) -> list[int]:
    """Return a prompt of so many tokens; prompts of different seeds differ from their first characters."""
    texts = short_prompts(token_count // _TOKENS_PER_TEXT + 1, seed=seed)
    return (await client.tokenize(f"{seed:04d} {' '.join(texts)}"))[:token_count]


def _report(found: Sequence[Measured], plan: Plan, *, engine_step: int, duration_s: float) -> None:
    def of(token_count: int, side: Side) -> list[float | None]:
        return [m.ttft_s for m in found if m.prompt_token_count == token_count and m.side is side]

    lengths = plan.prompt_token_counts
    show_table(
        "Seconds to the first token of a lone cold prompt: median (min to max)",
        ("tokens", *(side.value for side in Side)),
        [(str(n), *(spread_of(of(n, side)).text() for side in Side)) for n in lengths],
    )
    verdicts = [
        Verdict(
            f"{n} tokens, {side.value} / engine",
            ratios(of(n, side), of(n, Side.ENGINE)),
            TTFT_RATIO_TARGET,
            at_least=False,
        )
        for n in lengths
        for side in (Side.CACHE_OFF, Side.CACHE_ON)
    ]
    verdicts += [
        Verdict(
            f"{n} tokens, cache on / off",
            ratios(of(n, Side.CACHE_ON), of(n, Side.CACHE_OFF)),
            CACHE_RATIO_TARGET,
            at_least=False,
        )
        for n in lengths
    ]
    show_verdicts(verdicts)
    rounds = [{**dataclasses.asdict(m), "side": m.side.value} for m in found]
    content = {"setting": setting(), "plan": plan, "engine_step": engine_step, "duration_s": duration_s}
    path = write_json("lone", {**content, "targets": verdicts, "rounds": rounds})
    console.print(f"{path}; {duration_s:.0f} s")


if __name__ == "__main__":
    main()
