"""The warm-up runs whatever a request's options run, where kernels are compiled when they first run."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import LogprobsWanted, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.runner import pipeline, speculation
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner

from tests.fixtures.models import tiny_model_dir
from tests.unit.engine.runner.test_mixed_rows import runner_of
from tests.unit.engine.sampling.allow_only import AllowOnly

PROMPT = (5, 6, 7, 5, 6)
DRAWS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "temperature": [{"temperature": 0.7}],
    "top_p": [{"temperature": 0.7, "top_p": 0.8}, {}],
    "top_k": [{"temperature": 0.7, "top_k": 8}, {}],
    "min_p": [{"temperature": 0.7, "min_p": 0.2}, {"temperature": 1.0}],
    "xtc": [{"temperature": 0.7, "top_k": 8, "xtc_probability": 0.5}],
    "penalties": [{"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}, {}],
    "bias": [{"temperature": 0.5, "logit_bias": ((5, 2.0),)}],
    "bans": [{"banned": ((5, 6),)}, {"min_output_token_count": 4}],
    "many": [{"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2}, {}, {"temperature": 1.0}],
}


@contextlib.contextmanager
def primitives(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yield the names of all that is computed meanwhile."""
    found: set[str] = set()

    def watch(name: str) -> None:
        really = getattr(mx, name)

        def noted(*trees: Any) -> None:
            graph = io.StringIO()
            arrays = list(_arrays(trees))
            if arrays:
                mx.export_to_dot(graph, *arrays)
            found.update(re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue()))
            really(*trees)

        patch.setattr(mx, name, noted)

    with monkeypatch.context() as patch:
        for name in ("eval", "async_eval"):
            watch(name)
        yield found


def _arrays(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _arrays(each)


def draw(runner: ModelRunner, *rows: DecodeRow, pass_count: int = 6) -> list[tuple[int, int]]:
    """Let rows with the same prompt draw together."""
    for index, row in enumerate(rows):
        runner.open(SequenceId(index))
        runner.run([Chunk(SequenceId(index), row.prompt_token_ids[:-1])])
    last = [Chunk(SequenceId(i), row.prompt_token_ids[-1:], row=row) for i, row in enumerate(rows)]
    results = [runner.run(last), *(runner.run([]) for _ in range(pass_count))]
    runner.release([SequenceId(index) for index in range(len(rows))])
    runner.run([])
    return [(int(d.sequence_id), d.token_id) for result in results for d in result.drawn]


def rows_of_requests() -> Iterator[tuple[str, list[DecodeRow]]]:
    for name, options in DRAWS.items():
        yield name, [DecodeRow(SamplingParams(**each), PROMPT) for each in options]
    masked = DecodeRow(SamplingParams(), PROMPT, constraint=AllowOnly({5, 6}))
    yield "mask", [masked, DecodeRow(SamplingParams(), PROMPT)]
    yield "logprobs", [DecodeRow(SamplingParams(), PROMPT, logprobs=LogprobsWanted(top_count=3))]
    repeats = SamplingParams(logit_bias=((5, 1e4),))
    yield "guesses", [DecodeRow(repeats, PROMPT, speculation=Speculation(draft_token_limit=4))]
    yield "uneven", [DecodeRow(SamplingParams(), PROMPT[:count]) for count in (2, 3, 4, 5)]


@pytest.mark.parametrize("attention", Attention)
def test_no_request_is_the_first_to_run_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: Attention
) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    seen: dict[bool, set[str]] = {}
    fresh: dict[bool, dict[str, set[str]]] = {}
    drawn: dict[bool, list[Any]] = {}
    for warms in (True, False):
        with primitives(monkeypatch) as seen[warms]:
            runner = runner_of(folder, is_pipelined=True, attention=attention, warms_every_draw=warms)
            while runner.warm_up_more():
                pass
        fresh[warms], drawn[warms] = {}, []
        for name, rows in rows_of_requests():
            with primitives(monkeypatch) as found:
                drawn[warms].append(draw(runner, *rows))
            fresh[warms][name] = found - seen[warms]
        runner.close()
    assert {name: names for name, names in fresh[True].items() if names} == {}
    assert {name for name, names in fresh[False].items() if names} >= {"top_p", "mask", "penalties", "xtc"}
    assert drawn[True] == drawn[False], "it leaves nothing behind"


def test_guesses_are_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guessed: list[Any] = []
    guess = speculation.guesses_of

    def told(*args: Any) -> Any:
        found = guess(*args)
        guessed.extend(found[0])
        return found

    monkeypatch.setattr(pipeline, "guesses_of", told)
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=True, warms_every_draw=True)
    while runner.warm_up_more():
        pass
    assert any(len(each) for each in guessed)
    assert runner._sequences == {}
