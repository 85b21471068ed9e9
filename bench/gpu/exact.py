"""Are replies the same whether a prompt's KV is computed, in RAM or on SSD, alone or among others?

In float32 without TF32, where the order of additions moves no token that is not as good as tied. What they
are compared with is the same prompt alone in mlx-lm's engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from bench.cases.figure import Figure, FigureKey, Unit
from bench.engine_process import EngineProcess
from bench.gpu.callers import Heard
from bench.gpu.cases import ENGINE_SIZES, Setup, Sides
from bench.gpu.targets import EXACT, UNEQUAL

LENGTHS = (37, 255, 256, 257, 1000, 5000)
"""Around the border of a block, within one chunk and over several."""
OUTPUT_COUNT = 24
ENVIRONMENT = {"MLX_ENABLE_TF32": "0"}
_SEED = 700

Alone = Sequence[tuple[int, float]]
"""Tokens of a reply, each with its lead over the next likely one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """What the replies of one asking came to."""

    what: str
    cached_token_counts: tuple[int, ...]
    differences: tuple[str, ...]

    @property
    def line(self) -> str:
        """The asking as one line of text."""
        found = (
            "DIFFERENT: " + "; ".join(self.differences) if self.differences else "equal to the engine alone"
        )
        return f"{self.what}: {found} (cached {', '.join(map(str, self.cached_token_counts))})"


def judge_replies(
    what: str, heard: Sequence[Heard], alone: Sequence[Alone], lengths: Sequence[int]
) -> Judged:
    """Compare replies with the engine's, and say where one parts from it and how near a tie that was."""
    differences = []
    for reply, wanted, length in zip(heard, alone, lengths, strict=True):
        ids = reply.reply.token_ids
        if ids == tuple(token for token, _ in wanted):
            continue
        pairs = enumerate(zip(ids, wanted, strict=False))
        place = next((index for index, (got, (token, _)) in pairs if got != token), None)
        told = f"{len(ids)} tokens" if place is None else f"token {place}, a lead of {wanted[place][1]:.4f}"
        differences.append(f"prompt of {length}: {told}")
    return Judged(what, tuple(reply.cached_token_count for reply in heard), tuple(differences))


def measure_exactness(
    setup: Setup, *, lengths: Sequence[int] = LENGTHS, on_judged: Callable[[Judged], None]
) -> list[Figure]:
    """Ask for prompts cold, from RAM and, after a restart, from SSD, one by one and together; each asking is
    told once it is judged."""
    engine = EngineProcess(
        model_path=setup.model_path,
        dtype=setup.dtype,
        log_file=setup.log_file,
        sizes=ENGINE_SIZES,
        ignores_end_tokens=True,
        environment=ENVIRONMENT,
    )
    count = 0
    with engine:
        sides = Sides(setup, engine, seed=_SEED, environment=ENVIRONMENT)
        some, others = sides.prompts.take_each(lengths), sides.prompts.take_each(lengths)
        alone = {
            id(prompts): [engine.alone(prompt, max_output_tokens=OUTPUT_COUNT) for prompt in prompts]
            for prompts in (some, others)
        }

        def ask(what: str, prompts: Sequence[Sequence[int]], *, together: bool) -> None:
            nonlocal count
            groups = [prompts] if together else [[prompt] for prompt in prompts]
            heard = [
                each for group in groups for each in sides.callers.ask(group, max_output_tokens=OUTPUT_COUNT)
            ]
            told = f"{what}, {'together' if together else 'one by one'}"
            judged = judge_replies(told, heard, alone[id(prompts)], lengths)
            on_judged(judged)
            count += len(judged.differences)

        with sides.opened():
            ask("cold", some, together=False)
            ask("cold", others, together=True)
            ask("RAM", some, together=True)
            ask("RAM", others, together=False)
            sides.stop()
            sides.start()
            ask("SSD", some, together=False)
            ask("SSD", others, together=True)
    return [Figure(FigureKey(EXACT, UNEQUAL, unit=Unit.TOKENS), count)]
