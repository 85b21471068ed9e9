"""Rows that depend on their own tokens, beside plain ones, on a tiny model: pipelined and not."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from icehouse_server.clock import Clock, SystemClock
from icehouse_server.device import Backend, find_backend
from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import LogprobsWanted
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.attention.gather import GatherAttention
from icehouse_server.engine.attention.port import PagedAttention
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.ports import Chunk, DecodeRow
from icehouse_server.engine.runner import model_loader
from icehouse_server.engine.runner import runner as runner_module
from icehouse_server.engine.runner.forward.splits import Attention
from icehouse_server.engine.runner.runner import ModelRunner, RunnerSettings
from icehouse_server.engine.runner.warm_up import CommonParts

from tests.fixtures.engine import load_at_once, with_kernels
from tests.fixtures.models import VOCABULARY_SIZE, tiny_model_dir

STEPS = 14


class Residues:
    """Allows tokens whose remainder by 7 follows the last token's; complete after `length` tokens."""

    def __init__(self, *, length: int) -> None:
        self.accepted: list[int] = []
        self._length = length
        self.thread_ids: set[int] = set()

    @property
    def is_finished(self) -> bool:
        return len(self.accepted) >= self._length

    error = None
    allows_any = False

    def allows(self, token_id: int) -> bool:
        self.thread_ids.add(threading.get_ident())
        return token_id < VOCABULARY_SIZE and token_id % 7 == self._next_residue()

    def allowed_tokens(self) -> np.ndarray:
        assert not self.is_finished
        self.thread_ids.add(threading.get_ident())
        bits = np.zeros(-(-VOCABULARY_SIZE // 32) * 32, dtype=bool)
        bits[self._next_residue() : VOCABULARY_SIZE : 7] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> None:
        assert self.is_finished or token_id % 7 == self._next_residue(), (token_id, self.accepted)
        self.accepted.append(token_id)

    def _next_residue(self) -> int:
        return (self.accepted[-1] + 1) % 7 if self.accepted else 3


LOGPROBS = {0: LogprobsWanted(top_count=2), 2: LogprobsWanted(top_count=1, token_ids=(50, 9, 50))}
"""What rows ask for; each another number of tokens."""


def rows(*, output: dict[int, list[int]] | None = None) -> list[DecodeRow]:
    """Plain, penalized, banning and constrained rows; `output` is what each drew before it was parked."""
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=4, frequency_penalty=1.5, repetition_penalty=1.4),
        SamplingParams(temperature=1.1, seed=5, presence_penalty=2.0, presence_window=3, top_p=0.9),
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=6, top_k=30),
        SamplingParams(frequency_penalty=2.0, logit_bias=((50, 3.0),)),
        SamplingParams(temperature=0.8, seed=7, xtc_probability=0.5, xtc_threshold=0.05, top_k=9),
    ]
    constrained = (3, 4)
    return [
        DecodeRow(
            sampling,
            prompt_token_ids=tuple(3 + (i * 31 + j * 7) % 290 for j in range(2 + 3 * i)),
            output_token_ids=tuple((output or {}).get(i, ())),
            constraint=Residues(length=STEPS) if i in constrained else None,
            logprobs=LOGPROBS.get(i),
        )
        for i, sampling in enumerate(samplings)
    ]


def runner_of(
    folder: Path,
    *,
    is_pipelined: bool,
    kv_bits: int = 0,
    attention: Attention = Attention.AUTO,
    kernels: PagedAttention | None = None,
    warms_every_draw: bool = False,
    clock: Clock | None = None,
    device_clock: DeviceClock | None = None,
) -> ModelRunner:
    """Load a runner. `kernels` attend to pages in the place of the device's: plain MLX does where a CPU is to
    run ahead, since a CPU's own compute while a pass is built."""
    if kernels is None and is_pipelined and find_backend() is Backend.CPU:
        kernels = GatherAttention()
    source = model_loader.ModelSource(path=folder, model_id="tiny")
    runner = ModelRunner(
        source=source,
        tokenizer=model_loader.load_tokenizer(source),
        settings=RunnerSettings(
            is_pipelined=is_pipelined,
            kv_bits=kv_bits,
            kv_group_size=32,
            attention=attention,
            warms_every_draw=warms_every_draw,
        ),
        clock=clock or SystemClock(),
        common=CommonParts(device_clock or DeviceClock()),
    )
    with pytest.MonkeyPatch.context() as patched:
        if kernels is not None:
            patched.setattr(runner_module, "kernels_for", with_kernels(kernels))
        load_at_once(runner)
    return runner


def run(runner: ModelRunner, wanted: dict[int, DecodeRow], *, late: tuple[int, ...] = ()) -> dict[int, list]:
    """Run until each has drawn STEPS tokens, `late` ones coming in the middle; all Drawn by name.

    A prompt runs in two chunks, the second with the row; both beside whoever decodes.
    """
    drawn: dict[int, list] = {name: [] for name in wanted}
    begin = {name: 3 if name in late else 0 for name in wanted}
    ended: set[int] = set()
    for step in range(3 * STEPS):
        chunks = []
        for name, row in wanted.items():
            tokens = (*row.prompt_token_ids, *row.output_token_ids)
            cut = len(tokens) - 1 - name % 2
            if step == begin[name]:
                runner.open(SequenceId(name))
                chunks += [Chunk(SequenceId(name), tokens[:cut])] if cut else []
            if step == begin[name] + 1:
                chunks.append(Chunk(SequenceId(name), tokens[cut:], row=row))
        for token in runner.run(chunks).drawn:
            if token.sequence_id in ended:
                continue
            drawn[token.sequence_id].append(token)
            count = len(drawn[token.sequence_id]) + len(wanted[token.sequence_id].output_token_ids)
            if count == STEPS or token.error is not None:
                ended.add(token.sequence_id)
        runner.release([SequenceId(name) for name in ended])
        if len(ended) == len(wanted):
            assert runner.run([]).drawn == []
            return drawn
    raise AssertionError("the rows do not end")


def ids(drawn: dict[int, list]) -> dict[int, list[int]]:
    return {name: [token.token_id for token in tokens] for name, tokens in drawn.items()}


@pytest.mark.parametrize(("kv_bits", "attention"), [*((0, each) for each in Attention), (8, Attention.AUTO)])
@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_row_draws_the_same_alone_in_company_and_after_parking(
    tmp_path: Path, is_pipelined: bool, kv_bits: int, attention: Attention
) -> None:
    folder = tiny_model_dir(tmp_path, "llama", head_dim=32)
    runner = runner_of(folder, is_pipelined=is_pipelined, kv_bits=kv_bits, attention=attention)
    alone: dict[int, list[int]] = {}
    for name, row in enumerate(rows()):
        alone |= ids(run(runner, {name: row}))
    together = ids(run(runner, dict(enumerate(rows())), late=(1, 4, 5)))
    assert together == alone
    if kv_bits:
        return  # a chunk reads its own tokens unquantized, so parking may change a token
    resumed = ids(run(runner, dict(enumerate(rows(output={n: alone[n][:5] for n in alone})))))
    assert resumed == {name: tokens[5:] for name, tokens in alone.items()}
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone), "the rows differ"
    assert len(set(alone[5])) > len(set(ids(run(runner, {5: plain(5)}))[5])), "the penalty changes something"


def plain(index: int) -> DecodeRow:
    return DecodeRow(SamplingParams(), rows()[index].prompt_token_ids)


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_a_constraint_hears_every_token_and_says_when_it_is_complete(
    tmp_path: Path, is_pipelined: bool
) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=is_pipelined)
    wanted = dict(enumerate(rows()))
    drawn = run(runner, wanted)
    for name in (3, 4):
        constraint = wanted[name].constraint
        assert isinstance(constraint, Residues)
        assert constraint.accepted == [token.token_id for token in drawn[name]]
        assert [token.is_complete for token in drawn[name]] == [False] * (STEPS - 1) + [True]
        assert constraint.thread_ids == {threading.get_ident()}
    assert not any(token.is_complete for token in drawn[0])


@pytest.mark.parametrize("is_pipelined", [True, False])
def test_log_probabilities_are_of_the_token_they_come_with(tmp_path: Path, is_pipelined: bool) -> None:
    runner = runner_of(tiny_model_dir(tmp_path, "llama"), is_pipelined=is_pipelined)
    drawn = run(runner, dict(enumerate(rows())), late=(2,))
    for name, tokens in drawn.items():
        for token in tokens:
            assert (token.logprobs is not None) == (name in (0, 2))
            if token.logprobs is not None:
                assert token.logprobs.token_id == token.token_id
                assert len(token.logprobs.top) == LOGPROBS[name].top_count
                assert [asked.token_id for asked in token.logprobs.asked] == [*LOGPROBS[name].token_ids]
    assert all(t.logprobs.rank == 1 and t.logprobs.top[0].token_id == t.token_id for t in drawn[0])
    assert any(t.logprobs.rank > 1 for t in drawn[2])
    for name in (0, 2):
        alone = run(runner, {name: rows()[name]})[name]
        for here, there in zip(drawn[name], alone, strict=True):
            assert here.logprobs.logprob == pytest.approx(there.logprobs.logprob, abs=1e-4)
            assert [t.token_id for t in here.logprobs.top] == [t.token_id for t in there.logprobs.top]
            asked = [t.logprob for t in there.logprobs.asked]
            assert [t.logprob for t in here.logprobs.asked] == pytest.approx(asked, abs=1e-4)
