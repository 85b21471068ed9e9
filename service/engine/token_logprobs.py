"""Log probabilities of chosen tokens, for the rows or positions that want them (inference thread)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from service.domain.logprobs import Logprob, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobArrays:
    """One entry a row, on the device and perhaps not computed yet. `tops` are unsorted."""

    token_ids: mx.array
    logprobs: mx.array
    ranks: mx.array
    top_token_ids: mx.array
    top_logprobs: mx.array
    top_counts: tuple[int, ...]
    """How many of the top each row wants; the arrays hold the most that any wants."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What must be evaluated."""
        return (self.token_ids, self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)

    def read(self) -> list[TokenLogprobs]:
        """Wait for the arrays and return one entry a row."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = (
            cast("list[int]", a.tolist()) for a in self.arrays
        )
        tops = [
            tuple(Logprob(*pair) for pair in _likeliest(ids, values, count))
            for ids, values, count in zip(
                cast("list[list[int]]", top_ids),
                cast("list[list[float]]", top_logprobs),
                self.top_counts,
                strict=True,
            )
        ]
        return [
            TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=top)
            for token_id, logprob, rank, top in zip(token_ids, logprobs, ranks, tops, strict=True)
        ]


def measure(logits: mx.array, token_ids: mx.array, *, top_counts: Sequence[int]) -> LogprobArrays:
    """Return the log probabilities of one token a row. `logits` is [rows, vocabulary], as the model gave
    them; `token_ids` is [rows]. Nothing is evaluated."""
    values = logits.astype(mx.float32)
    total = mx.logsumexp(values, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(values, token_ids[:, None], axis=-1)
    ranks = mx.sum(values > chosen, axis=-1) + 1
    most = min(max(top_counts), values.shape[-1])
    if most:
        top_ids = mx.argpartition(-values, kth=most - 1, axis=-1)[:, :most]
    else:
        top_ids = mx.zeros((len(top_counts), 0), dtype=mx.uint32)
    return LogprobArrays(
        token_ids=token_ids,
        logprobs=(chosen - total)[:, 0],
        ranks=ranks,
        top_token_ids=top_ids,
        top_logprobs=mx.take_along_axis(values, top_ids, axis=-1) - total,
        top_counts=tuple(top_counts),
    )


def _likeliest(token_ids: list[int], logprobs: list[float], count: int) -> list[tuple[int, float]]:
    """Return the first `count`, falling; equals by id, so that a batch's make-up does not show."""
    return sorted(zip(token_ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))[:count]
