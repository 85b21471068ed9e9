"""Speculative lane: a row that guesses ahead and verifies its guesses in one pass (inference thread).

Each step feeds the last token and the drafts behind it, and draws every position exactly as plain
decoding would: from its own logits, with the key of its own place. Drafts count while they equal
what was drawn, so the output is the plain one for any sampling, and a wrong guess costs only work.
What was fed in vain is taken back out of the caches.

Rows that speculate do not share passes: each takes a different number of tokens a step, and mlx-lm's
batch caches cannot take back a different number in each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from icehouse_server.domain.ids import SequenceId
from icehouse_server.domain.request import DraftCounts, SpeculationLimit
from icehouse_server.engine.core.ports import Drawn
from icehouse_server.engine.kv_cache import cache_classes, rewind
from icehouse_server.engine.runner.decode_batch import JoiningRow
from icehouse_server.engine.sampling.logprobs import LogprobArrays, measure
from icehouse_server.engine.sampling.sampler import sample


class Trial(NamedTuple):
    """How many drafts must be accepted in so many steps. With fewer the row is better off in the batch, where
    a step of all costs little more than its own pass."""

    step_count: int
    least_accepted_count: int


class Drafter(Protocol):
    """Guesses how one sequence goes on."""

    def propose(self, count: int) -> list[int] | mx.array:
        """Return at most `count` tokens that may come next; an array need not be evaluated."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add what was generated."""
        ...


class SpeculativeLane:
    """Dispatched and collected like a DecodeBatch; gives one to `draft_token_limit` + 1 tokens a step.

    Never a step ahead: how far a step got decides where the next one begins. The token drawn last is
    not in the caches yet.
    """

    is_solitary = True

    def __init__(
        self,
        joining: JoiningRow,
        *,
        drafter: Drafter,
        draft_token_limit: int,
        trial: Trial,
        untold: Drawn | None = None,
    ) -> None:
        """`untold` is the joining row's last token where it was drawn and not told yet."""
        self.model = joining.model
        self._trial = trial
        self._untold = untold
        self._drafter = drafter
        self._draft_token_limit = draft_token_limit
        self._ids = [joining.sequence_id]
        self._row = joining.sampling
        self._caches = joining.caches
        self._last_token_id = joining.last_token_id
        self._step_count = 0
        self._accepted_count = 0
        self.accepted_total = 0
        """Right guesses since the row came."""
        self._drafts: mx.array | None = None
        self._tokens: mx.array | None = None
        self._measured: LogprobArrays | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def is_fruitless(self) -> bool:
        """Whether the latest trial has ended with too few right guesses."""
        trial = self._trial
        return self._step_count == trial.step_count and self._accepted_count < trial.least_accepted_count

    def leave(self) -> JoiningRow:
        """Return the row, between steps, as one that decodes plainly from here on; the lane is empty then."""
        (sequence_id,) = self._ids
        row = JoiningRow(sequence_id, self._caches, self._last_token_id, self._row, self.model)
        self.remove([sequence_id])
        return row

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._ids)

    def join(self, joining: Sequence[JoiningRow]) -> None:
        """Nobody joins: the lane is solitary."""
        raise AssertionError(f"{len(joining)} rows came to a lane of one")

    def dispatch(self) -> None:
        """Start the pass over the last token and the drafts behind it."""
        assert self._tokens is None, "dispatch and collect take turns"
        if self._step_count == self._trial.step_count:
            self._step_count = self._accepted_count = 0
        proposed = self._drafter.propose(self._draft_token_limit)
        drafts = proposed if isinstance(proposed, mx.array) else mx.array(proposed, dtype=mx.int32)
        fed = mx.concatenate([mx.array([self._last_token_id], dtype=mx.int32), drafts])
        logits = self.model(fed[None], cache=self._caches)[0]
        rows = [self._row.ahead(step) for step in range(len(fed))]
        self._tokens = sample(logits, rows)
        self._drafts = drafts
        arrays = [self._tokens, drafts]
        if self._row.logprobs is not None:
            self._measured = measure(logits, self._tokens, wanted=[self._row.logprobs] * len(rows))
            arrays += self._measured.arrays
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]

    def draw(self) -> None:
        """Nothing is left to draw: no row here waits for its own tokens."""

    def collect(self) -> list[Drawn]:
        """Wait for the pass; return the tokens that plain decoding would have drawn, one step each."""
        assert self._tokens is not None and self._drafts is not None, "collect follows dispatch"
        token_ids = cast("list[int]", self._tokens.tolist())
        drafts = cast("list[int]", self._drafts.tolist())
        accepted = 0
        while accepted < len(drafts) and token_ids[accepted] == drafts[accepted]:
            accepted += 1
        rewind.rewind(self._caches, len(drafts) - accepted)
        logprobs = self._measured.read() if self._measured is not None else ()
        self._tokens, self._drafts, self._measured = None, None, None
        self._step_count += 1
        self._accepted_count += accepted
        self.accepted_total += accepted
        kept = token_ids[: accepted + 1]
        self._row.drawn_count += len(kept)
        self._drafter.extend(kept)
        self._last_token_id = kept[-1]
        counts = DraftCounts(len(drafts), accepted)
        (sequence_id,) = self._ids
        told = [self._untold] if self._untold is not None else []
        self._untold = None
        for token_id, entry in itertools.zip_longest(kept, logprobs[: len(kept)]):
            told.append(Drawn(sequence_id, token_id, entry))
        return [
            drawn._replace(
                drafts=counts if place == 0 else None,
                # All that are told were fed in this pass but the last.
                fed_ahead_count=len(told) - 1 - place,
            )
            for place, drawn in enumerate(told)
        ]

    def locate(self, sequence_id: SequenceId) -> tuple[list[cache_classes.Cache], int]:
        """Return the caches, which hold every token but the one drawn last."""
        assert sequence_id in self._ids
        return self._caches, 0

    def remove(self, sequence_ids: Collection[SequenceId]) -> None:
        """Drop the row, between steps."""
        if set(self._ids) & set(sequence_ids):
            self._ids.clear()
            self._caches = []


def speculation_limit(joining: JoiningRow) -> SpeculationLimit:
    """Tell why a row cannot speculate from the start; NONE when it can."""
    if joining.sampling.needs_tokens:
        return SpeculationLimit.SAMPLING
    return SpeculationLimit.NONE if rewind.can_rewind(joining.caches) else SpeculationLimit.CACHE
