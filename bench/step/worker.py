"""One side of `make bench CASE=step` in a process of its own: `python -m bench.step.worker SIDE MODEL`.

Reads one order a line, `{"rows": n, "prompt": n, "passes": n}`, and answers with the CPU time of the thread
that builds passes, for each pass, how much of it was in MLX's evaluation, and the primitives of one pass.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx
from icehouse_server.device import find_device

from bench.step.primitives import counted_primitives
from bench.step.stand_ins import GPU, have_one_primitive_each, have_page_kernels, take_gpu_ways
from tests.fixtures.models.at_once import load

ENGINE = "mlx-lm"
_OUTPUT_LIMIT = 8000
_EVALUATIONS = ("eval", "async_eval")


class Watch:
    """Thread times of passes while some are wanted. Used by the thread that builds them."""

    def __init__(self) -> None:
        self._wanted_count = 0
        self._evaluation_s = 0.0
        self._passes: list[tuple[float, float]] = []
        self._primitive_count = 0
        self._done = threading.Event()
        for name in _EVALUATIONS:
            setattr(mx, name, self._timed(getattr(mx, name)))

    def begin(self, count: int) -> None:
        """Watch the next passes."""
        self._passes, self._primitive_count = [], 0
        self._done.clear()
        self._wanted_count = count

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def told(self) -> dict[str, Any]:
        """Return what was watched, as an answer."""
        cpu_s, evaluation_s = zip(*self._passes, strict=True)
        return {"cpu_s": cpu_s, "evaluation_s": evaluation_s, "primitives": self._primitive_count}

    def run(self, one_pass: Callable[[], Any]) -> Any:
        """Run a pass, watched if it is wanted: of the first one primitives are counted, others are timed."""
        if not self._wanted_count:
            return one_pass()
        if not self._primitive_count:
            with counted_primitives() as counts:
                result = one_pass()
            self._primitive_count = sum(counts)
            return result
        self._evaluation_s = 0.0
        began = time.thread_time()
        result = one_pass()
        self._passes.append((time.thread_time() - began, self._evaluation_s))
        self._wanted_count -= 1
        if not self._wanted_count:
            self._done.set()
        return result

    def _timed(self, really: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*trees: Any) -> Any:
            began = time.thread_time()
            try:
                return really(*trees)
            finally:
                self._evaluation_s += time.thread_time() - began

        return evaluate


def main() -> None:
    """Be the side that is named, until standard input ends."""
    side, path = sys.argv[1], Path(sys.argv[2])
    # Whatever libraries print must not end up between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    is_gpu = find_device().is_gpu
    if not is_gpu:
        take_gpu_ways()
    if side == ENGINE:
        _be_engine(path, answers, is_gpu=is_gpu)
    else:
        asyncio.run(_be_server(side, path, answers, is_gpu=is_gpu))


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


async def _be_server(attention: str, path: Path, answers: TextIO, *, is_gpu: bool) -> None:
    # Only now: these ask for the device.
    from icehouse_server.engine.engine_loop import EngineLoop

    from bench.step.engine import running_engine, until

    if not is_gpu:
        have_page_kernels()
    device = find_device() if is_gpu else GPU
    async with running_engine(path, device=device, flags={"engine.attention": attention}) as engine:
        if not is_gpu:
            have_one_primitive_each()
        watch, own_step = Watch(), EngineLoop.step
        EngineLoop.step = lambda self: watch.run(lambda: own_step(self))  # type: ignore[method-assign]
        _say(answers, {"ready": True, "device": device.name})
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            rows = engine.rows(order["rows"], prompt_token_count=order["prompt"], output_limit=_OUTPUT_LIMIT)
            async with rows:
                watch.begin(order["passes"])
                await until(lambda: watch.is_done)
            _say(answers, watch.told())


def _be_engine(path: Path, answers: TextIO, *, is_gpu: bool) -> None:
    from icehouse_server.engine.runner import model_loader
    from mlx_lm.generate import BatchGenerator

    from bench.prompts import FreshPrompts

    model: Any = load(model_loader.ModelSource(path=path, model_id="bench")).model
    if not is_gpu:
        have_one_primitive_each()
    watch = Watch()
    prompts = FreshPrompts(range(80, 160), seed=1)
    _say(answers, {"ready": True, "device": find_device().name})
    for line in sys.stdin:
        order = json.loads(line)
        generator = BatchGenerator(model, max_tokens=_OUTPUT_LIMIT, completion_batch_size=64)
        generator.insert(prompts.take_each([order["prompt"]] * order["rows"]))
        while len(generator.next()[1]) < order["rows"]:
            pass
        watch.begin(order["passes"])
        while not watch.is_done:
            watch.run(generator.next)
        generator.close()
        _say(answers, watch.told())


if __name__ == "__main__":
    main()
