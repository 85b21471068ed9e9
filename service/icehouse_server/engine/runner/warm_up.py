"""Warm-up: what a runner runs of a new model before anyone asks for it (inference thread).

A device that compiles a kernel when it first runs would do so while a caller waits, and all others in the
pass. CUDA compiles gathers, scatters and fused kernels this way, each for its types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from icehouse_server.domain.ids import AdapterName, SequenceId
from icehouse_server.domain.request import LogprobsWanted, Speculation
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.device_clock import DeviceClock
from icehouse_server.engine.core.ports import Chunk, DecodeRow, Runner
from icehouse_server.engine.kv.backend_choice import Geometry
from icehouse_server.engine.kv.page_groups import GroupFacts
from icehouse_server.engine.kv.runner_blocks import Footprint
from icehouse_server.engine.runner.forward.splits import PassFacts

ModelKey = tuple[str, bool]
"""A model's fingerprint, and whether its layers may be joined."""

TRIED: Final = SequenceId(-1)
"""The first id of the sequences that are run before any request."""
_PROVING_PASSES: Final = 8
"""More than it takes for a pass to be traced, and then proved."""

_TOKEN: Final = 0
"""What prompts are made of: every vocabulary has it."""
_PLAIN: Final = SamplingParams()
_LOGPROBS: Final = LogprobsWanted(top_count=2, token_ids=(_TOKEN,))
_FILTERS: Final = (
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=2, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=2, xtc_probability=1.0, xtc_threshold=0.1),
)
_EDITED: Final = SamplingParams(
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((_TOKEN, 1.0),),
    banned=((_TOKEN,),),
)
_REPEATING: Final = SamplingParams(logit_bias=((_TOKEN, 1e4),))
"""It draws what it guessed from its prompt."""


def warm_up_steps(runner: Runner, adapter: AdapterName) -> Iterator[None]:
    """Run one prompt and draw from it, so that kernels are compiled before anyone waits for them."""
    row = DecodeRow(SamplingParams(), prompt_token_ids=(0, 0))
    runner.open(TRIED)
    runner.run([Chunk(TRIED, [0, 0], adapter)])
    yield
    runner.run([Chunk(TRIED, [0], adapter, row=row)])
    yield
    runner.run([])
    end_trial(runner, [TRIED])
    yield


def proving_steps(runner: Runner, adapter: AdapterName) -> Iterator[None]:
    """Let two rows decode until replayed passes have been compared with built ones."""
    ids = [TRIED, SequenceId(TRIED - 1)]
    for length, sequence_id in enumerate(ids, start=1):
        runner.open(sequence_id)
        row = DecodeRow(SamplingParams(), prompt_token_ids=(0,) * length)
        runner.run([Chunk(sequence_id, row.prompt_token_ids, adapter, row=row)])
        yield
    for _ in range(_PROVING_PASSES):
        runner.run([])
        yield
    end_trial(runner, ids)
    yield


def draw_batch(runner: Runner, batch: Sequence[DecodeRow]) -> None:
    """Draw a few tokens of each row."""
    rows = {SequenceId(TRIED - index): row for index, row in enumerate(batch)}
    for sequence_id, row in rows.items():
        runner.open(sequence_id)
        runner.run([Chunk(sequence_id, row.prompt_token_ids[:-1])])
    runner.run([Chunk(each, row.prompt_token_ids[-1:], row=row) for each, row in rows.items()])
    for _ in range(3):
        runner.run([])
    end_trial(runner, list(rows))


def end_trial(runner: Runner, sequence_ids: Sequence[SequenceId]) -> None:
    """Release sequences, and leave no pass to be read."""
    runner.release(sequence_ids)
    runner.run([])
    mx.reset_peak_memory()


def warm_up_rows() -> list[list[DecodeRow]]:
    """Return the rows of several batches, which together draw with every option that a request can have. No
    two prompts in a batch have the same length.

    Filters run alone, where logits keep the model's type; beside a greedy row, for which the other rows are
    gathered and put back; and beside rows whose options make all logits float32.
    """
    batches = [[_row(2, params)] for params in _FILTERS]
    batches += [[_row(2, _PLAIN), _row(3, params)] for params in _FILTERS]
    batches.append([_row(2, _EDITED)])
    batches.append([_row(2, _PLAIN, is_masked=True, logprobs=_LOGPROBS)])
    edited = [_row(2, _EDITED, logprobs=_LOGPROBS), _row(3, _PLAIN), _row(4, _PLAIN, is_masked=True)]
    batches.append([*edited, *(_row(5 + index, params) for index, params in enumerate(_FILTERS))])
    guesses = Speculation(draft_token_limit=2)
    batches.append([_row(4, _REPEATING, speculation=guesses), _row(2, _PLAIN), _row(3, _FILTERS[2])])
    return batches


class _FirstWord:
    """A constraint that allows one word of tokens, and needs its mask."""

    is_finished = False
    allows_any = False
    error = None

    def allows(self, token_id: int) -> bool:
        return token_id < np.iinfo(np.uint32).bits

    def allowed_tokens(self) -> npt.NDArray[np.uint32]:
        return np.full(1, np.iinfo(np.uint32).max, dtype=np.uint32)

    def accept(self, token_id: int) -> None:
        """It allows the same tokens whatever was drawn."""


def _row(
    prompt_token_count: int,
    sampling: SamplingParams,
    *,
    is_masked: bool = False,
    logprobs: LogprobsWanted | None = None,
    speculation: Speculation | None = None,
) -> DecodeRow:
    return DecodeRow(
        sampling,
        prompt_token_ids=(_TOKEN,) * prompt_token_count,
        constraint=_FirstWord() if is_masked else None,
        logprobs=logprobs,
        speculation=speculation,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class KnownModel:
    """What was found out about a model when it was first loaded. What it needs was compiled then."""

    passes: PassFacts
    footprint: Footprint
    page_groups: tuple[GroupFacts, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CommonParts:
    """What the runners of a process share."""

    device_clock: DeviceClock = dataclasses.field(default_factory=DeviceClock)
    known: dict[ModelKey, KnownModel] = dataclasses.field(default_factory=dict)
    """Models that were loaded before."""
    proved: dict[Geometry, int] = dataclasses.field(default_factory=dict)
    """Which of the device's kernels are proved for which layers."""
