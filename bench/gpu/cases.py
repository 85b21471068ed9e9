"""Cases of `make bench CASE=gpu`: each measures one round and returns its figures.

Prompts are sent as tokens and nobody has seen them before, except where a hit is what is measured; replies
are greedy and of full length. The cache is on, as it is where nobody says otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.cases.figure import (
    PREFILL_TIME_RATIO,
    RESTART_RATIO,
    TOKENS_PER_S_RATIO,
    WORST_TTFT_RATIO,
    Figure,
    FigureKey,
    Unit,
)
from bench.engine_process import EngineProcess, EngineSizes
from bench.gpu.callers import Callers
from bench.gpu.passes import FILE_VARIABLE
from bench.gpu.targets import (
    ALONE_GAP_RATIO,
    BESIDE,
    HIT_MS,
    RESTART,
    SERVING_S,
    START,
    ram_hit,
)
from bench.prompts import FreshPrompts
from bench.replies import Reply, gaps_inside, gaps_overlapping, measure, quantile
from bench.server_process import ROOT, ServerProcess, child_environment

ENGINE_SIZES = EngineSizes(completion_batch_size=64, prefill_batch_size=8, prefill_step_size=2048)
SHORT, LONG = 40, 16_000
_ROW_COUNT = 16
_ROW_TOKEN_LIMIT = 20_000
_ROW_TOKENS_BEFORE = 200
"""Of each row that decodes, before the long prompt comes."""
_WARM_UP_OUTPUT_COUNT = 8
_HIT_OUTPUT_COUNT = 16
_HIT_COUNT = 3
_BOOT_TIMEOUT_S = 300.0
_LOAD = "from mlx_lm import load; import sys; load(sys.argv[1])"

PASS_MS = FigureKey("one row", "p50 between tokens, ms", unit=Unit.SECONDS)
LOAD_S = FigureKey(START, "mlx-lm's load, s", unit=Unit.SECONDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Burst:
    """Prompts that come at the same moment."""

    name: str
    prompt_token_counts: tuple[int, ...]
    output_token_count: int


BURSTS = {
    "c64": Burst("64 clients", (SHORT,) * 64, 128),
    "8x2000": Burst("8 x 2,000", (2000,) * 8, 64),
    "c1": Burst("1 client", (SHORT,), 128),
    "c16": Burst("16 clients", (SHORT,) * 16, 128),
    "32x1000": Burst("32 x 1,000", (1000,) * 32, 128),
    "lone": Burst("lone 16,000", (LONG,), 2),
    "c4": Burst("4 clients", (SHORT,) * 4, 128),
    "mix": Burst("15 x 40 + 1 x 8,000", (*(SHORT,) * 15, 8000), 64),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What is served, and how."""

    model_path: Path
    vocabulary_size: int
    dtype: str
    """Of the engine's weights; empty for the model's own, as on a GPU."""
    scratch: Path
    log_file: Path
    flags: tuple[str, ...]
    scale: float = 1.0
    """Of all lengths but the short prompts'; what a look on a CPU makes smaller."""

    def scaled(self, token_count: int, *, least: int = 8) -> int:
        """Return a length at this scale; short prompts keep theirs."""
        return token_count if token_count <= SHORT else max(least, round(token_count * self.scale))


class Sides:
    """The server with its callers, and the engine: only one computes at a time."""

    def __init__(
        self,
        setup: Setup,
        engine: EngineProcess,
        *,
        seed: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.setup = setup
        self.engine = engine
        self.prompts = FreshPrompts(range(300, min(40_000, setup.vocabulary_size)), seed=seed)
        self.passes_file = setup.scratch / "passes"
        self._environment = {**(environment or {}), FILE_VARIABLE: str(self.passes_file)}
        self.server: ServerProcess
        self.callers: Callers
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def opened(self) -> Iterator[Sides]:
        """Serve while the block lasts."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def start(self) -> None:
        """Start the server, on the cache that an earlier one has left."""
        setup = self.setup
        self.server = ServerProcess(
            model=str(setup.model_path),
            cache_directory=setup.scratch / "blocks",
            log_file=setup.log_file,
            flags=setup.flags,
            module="bench.gpu.passes",
            environment=self._environment,
            boot_timeout_s=_BOOT_TIMEOUT_S,
        )
        self._open.enter_context(self.server)
        self.callers = self._open.enter_context(Callers(self.server.address, log_file=setup.log_file))
        self.callers.ask([self.prompts.take(5)], max_output_tokens=4)

    def stop(self) -> None:
        """Stop the server; what it keeps goes to SSD first."""
        self._open.close()

    def burst(self, burst: Burst, *, server_first: bool, output_count: int = 0) -> list[Figure]:
        """Let both sides answer new prompts."""
        lengths = [self.setup.scaled(count) for count in burst.prompt_token_counts]
        prompts = self.prompts.take_each(lengths)
        count = output_count or self.setup.scaled(burst.output_token_count)
        count = min(count, burst.output_token_count)
        ours = self._ask(prompts, count) if server_first else []
        theirs = self.engine.generate(prompts, max_output_tokens=count)
        return figures_of_burst(burst.name, ours or self._ask(prompts, count), theirs)

    def warm_up(self, burst: Burst) -> None:
        """Let both sides meet the sizes of a burst that nobody measures."""
        self.burst(burst, server_first=True, output_count=_WARM_UP_OUTPUT_COUNT)

    def _ask(self, prompts: Sequence[Sequence[int]], count: int) -> list[Reply]:
        return [heard.reply for heard in self.callers.ask(prompts, max_output_tokens=count)]


def figures_of_burst(name: str, ours: Sequence[Reply], theirs: Sequence[Reply]) -> list[Figure]:
    """Return ratios of the server's replies to the engine's, and what both are made of."""
    own, engine = measure(ours), measure(theirs)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True))
    details = {
        ("tokens/s", Unit.TOKENS_PER_S): own.tokens_per_s,
        ("engine's tokens/s", Unit.TOKENS_PER_S): engine.tokens_per_s,
        ("last first token, ms", Unit.SECONDS): 1000 * own.ttft_worst_s,
        ("engine's last first token, ms", Unit.SECONDS): 1000 * engine.ttft_worst_s,
        ("p50 between tokens, ms", Unit.SECONDS): 1000 * own.itl_p50_s,
        ("p99 between tokens, ms", Unit.SECONDS): 1000 * own.itl_p99_s,
        ("engine's p50 between tokens, ms", Unit.SECONDS): 1000 * engine.itl_p50_s,
        ("engine's p99 between tokens, ms", Unit.SECONDS): 1000 * engine.itl_p99_s,
        ("equal replies", Unit.RATIO): equal / len(ours),
    }
    return [
        Figure(FigureKey(name, TOKENS_PER_S_RATIO), own.tokens_per_s / engine.tokens_per_s),
        Figure(FigureKey(name, WORST_TTFT_RATIO), own.ttft_worst_s / engine.ttft_worst_s),
        *(Figure(FigureKey(name, what, unit=unit), value) for (what, unit), value in details.items()),
    ]


def ram_hits(sides: Sides, token_count: int) -> list[Figure]:
    """Ask for one prompt again and again: cold, then from RAM. One figure of each hit."""
    name = ram_hit(token_count)
    prompt = sides.prompts.take(sides.setup.scaled(token_count))

    def ask() -> tuple[Reply, int]:
        (heard,) = sides.callers.ask([prompt], max_output_tokens=_HIT_OUTPUT_COUNT)
        return heard.reply, heard.cached_token_count

    cold, _ = ask()
    figures = [Figure(FigureKey(name, "cold, ms", unit=Unit.SECONDS), 1000 * cold.ttft_s)]
    for _ in range(_HIT_COUNT):
        reply, cached_count = ask()
        figures += [
            Figure(FigureKey(name, HIT_MS, unit=Unit.SECONDS), 1000 * reply.ttft_s),
            Figure(FigureKey(name, "first token / cold"), reply.ttft_s / cold.ttft_s),
            Figure(FigureKey(name, "cached tokens", unit=Unit.TOKENS), cached_count),
            Figure(PASS_MS, 1000 * measure([reply]).itl_p50_s),
        ]
    return figures


def beside(sides: Sides) -> list[Figure]:
    """Time a long prompt alone, then beside sixteen rows whose gaps are timed before it and meanwhile."""
    setup = sides.setup
    (alone,) = sides.callers.ask([sides.prompts.take(setup.scaled(LONG))], max_output_tokens=1)
    heard = sides.callers.ask_beside(
        sides.prompts.take_each([SHORT] * _ROW_COUNT),
        sides.prompts.take(setup.scaled(LONG)),
        most_tokens=setup.scaled(_ROW_TOKEN_LIMIT),
        tokens_before=setup.scaled(_ROW_TOKENS_BEFORE),
    )
    start_s, stop_s = heard.reply.start_time_s, heard.reply.token_times_s[0]
    return figures_beside(heard.row_token_times_s, start_s=start_s, stop_s=stop_s, alone_s=alone.reply.ttft_s)


def figures_beside(
    rows: Sequence[Sequence[float]], *, start_s: float, stop_s: float, alone_s: float
) -> list[Figure]:
    """Return what the rows' token times say of a prompt that was prefilled from `start_s` to `stop_s`."""
    all_decode_s = max(times[0] for times in rows)
    before = [gap for times in rows for gap in gaps_inside(times, start_s=all_decode_s, stop_s=start_s)]
    meanwhile = [gap for times in rows for gap in gaps_overlapping(times, start_s=start_s, stop_s=stop_s)]
    details = {
        "p50 alone, ms": quantile(before, 0.5),
        "p99 alone, ms": quantile(before, 0.99),
        "p99 beside, ms": quantile(meanwhile, 0.99),
        "prompt alone, ms": alone_s,
        "prompt beside, ms": stop_s - start_s,
    }
    ratio = quantile(meanwhile, 0.99) / quantile(before, 0.99)
    return [
        Figure(FigureKey(BESIDE, ALONE_GAP_RATIO), ratio),
        Figure(FigureKey(BESIDE, PREFILL_TIME_RATIO), (stop_s - start_s) / alone_s),
        *(Figure(FigureKey(BESIDE, what, unit=Unit.SECONDS), 1000 * s) for what, s in details.items()),
    ]


def restart(sides: Sides) -> list[Figure]:
    """Stop and start the server between two askings of one prompt; time that start, and mlx-lm's own."""
    prompt = sides.prompts.take(sides.setup.scaled(LONG))
    (cold,) = sides.callers.ask([prompt], max_output_tokens=2)
    began = time.monotonic()
    sides.stop()
    stop_s = time.monotonic() - began
    sides.start()
    (warm,) = sides.callers.ask([prompt], max_output_tokens=2)
    seconds = {
        "cold, ms": 1000 * cold.reply.ttft_s,
        HIT_MS: 1000 * warm.reply.ttft_s,
        "stop of the server before, s": stop_s,
    }
    return [
        Figure(FigureKey(RESTART, RESTART_RATIO), warm.reply.ttft_s / cold.reply.ttft_s),
        Figure(FigureKey(RESTART, "cached tokens", unit=Unit.TOKENS), warm.cached_token_count),
        *(Figure(FigureKey(RESTART, what, unit=Unit.SECONDS), value) for what, value in seconds.items()),
        Figure(FigureKey(START, SERVING_S, unit=Unit.SECONDS), sides.server.boot_s),
        Figure(LOAD_S, _load_s(sides.setup.model_path)),
    ]


def _load_s(model_path: Path) -> float:
    """Return how long a process takes that has mlx-lm load the model and ends."""
    began = time.monotonic()
    command = [sys.executable, "-c", _LOAD, str(model_path)]
    subprocess.run(command, cwd=ROOT, env=child_environment(), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


OTHERS: dict[str, Callable[[Sides], list[Figure]]] = {
    "ram2000": lambda sides: ram_hits(sides, 2000),
    "ram16000": lambda sides: ram_hits(sides, LONG),
    "beside": beside,
    "restart": restart,
}
ORDER = (
    "c64", "8x2000", "c1", "c16", "32x1000", "ram2000", "ram16000", "lone", "c4", "beside", "restart", "mix",
)  # fmt: skip
"""The most important first: what there is no time for is left out."""
assert set(ORDER) == {*BURSTS, *OTHERS}
