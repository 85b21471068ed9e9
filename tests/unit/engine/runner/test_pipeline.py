"""Passes that run one behind the other: what each took, and what is left of those that are in flight."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.core.ports import Chunk
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings

from tests.fixtures.models import tiny_model_dir

PROMPT = tuple(3 + j * 7 % 290 for j in range(12))


class TickingClock:
    """A second passes with each look at it."""

    def __init__(self) -> None:
        self._seconds = itertools.count()

    def monotonic(self) -> float:
        return float(next(self._seconds))

    def wall(self) -> float:
        return self.monotonic()


def runner_at(path: Path, clock: TickingClock, *, is_pipelined: bool) -> ModelRunner:
    source = model_loader.ModelSource(path=tiny_model_dir(path, "llama"), model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(is_pipelined=is_pipelined),
        clock=clock,
    )
    runner.load()
    return runner


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_nothing_is_kept_of_a_row_that_was_released(tmp_path: Path, is_pipelined: bool) -> None:
    """A pass of it may be in flight, and be looked at only when somebody asks for another one."""
    runner = runner_at(tmp_path, TickingClock(), is_pipelined=is_pipelined)
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    runner.open(SequenceId(1))
    runner.run([Chunk(SequenceId(1), PROMPT, row=row)])
    runner.run([])
    caches = [weakref.ref(cache) for cache in runner.caches(SequenceId(1))]
    runner.release([SequenceId(1)])
    gc.collect()
    assert caches and not any(cache() for cache in caches)
    assert runner.run([]).drawn == []


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_the_times_of_passes_never_overlap(tmp_path: Path, is_pipelined: bool) -> None:
    """A chunk behind a pass in flight is not timed from where it was dispatched, which would count that pass
    twice, and the next one not as nothing."""
    clock = TickingClock()
    runner = runner_at(tmp_path, clock, is_pipelined=is_pipelined)
    began = clock.monotonic()
    row = DecodeRow(SamplingParams(), prompt_token_ids=PROMPT)
    runner.open(SequenceId(1))
    told = [runner.run([Chunk(SequenceId(1), PROMPT, row=row)])]
    runner.open(SequenceId(2))
    told += [runner.run([Chunk(SequenceId(2), PROMPT[start : start + 4])]) for start in (0, 4, 8)]
    told += [runner.run([]) for _ in range(4)]
    runner.release([SequenceId(1), SequenceId(2)])
    told.append(runner.run([]))
    passes = [result.elapsed_s for result in told if result.elapsed_s]
    assert [result.is_behind for result in told[1:-1]] == [is_pipelined] * 7
    assert len(passes) == 8, passes
    assert min(passes) >= 1.0 and sum(passes) <= clock.monotonic() - began
    # Each look at the clock is a second: one as a pass is built, one as it ends.
    assert max(passes[1:]) <= 2.0, passes
