"""Log probabilities of chosen tokens, for the rows or positions that want them (inference thread)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from icehouse_server.domain.request import Logprob, LogprobsWanted, TokenLogprobs


class LogprobArrays(NamedTuple):
    """One entry per row, on the device and perhaps not computed yet. `top_` arrays are unsorted."""

    token_ids: mx.array
    logprobs: mx.array
    ranks: mx.array
    top_token_ids: mx.array
    top_logprobs: mx.array
    asked_logprobs: mx.array
    wanted: tuple[LogprobsWanted, ...]
    """What each row wants; the arrays are as wide as the row that wants most."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that must be evaluated."""
        return self[:-1]

    def read(self) -> list[TokenLogprobs]:
        """Wait for the arrays and return one entry per row."""
        token_ids, logprobs, ranks, top_ids, top_logprobs, asked_logprobs = (
            cast("list[Any]", a.tolist()) for a in self.arrays
        )

        def likeliest(ids: list[int], values: list[float]) -> list[tuple[int, float]]:
            # Ties go by id, so that a row's result does not depend on the rest of the batch.
            return sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))

        tops = [
            tuple(Logprob(*pair) for pair in likeliest(ids, values)[: wanted.top_count])
            for ids, values, wanted in zip(top_ids, top_logprobs, self.wanted, strict=True)
        ]
        asked = [
            tuple(map(Logprob, wanted.token_ids, values))
            for values, wanted in zip(asked_logprobs, self.wanted, strict=True)
        ]
        return [TokenLogprobs(*row) for row in zip(token_ids, logprobs, ranks, tops, asked, strict=True)]


def measure(logits: mx.array, token_ids: mx.array, *, wanted: Sequence[LogprobsWanted]) -> LogprobArrays:
    """Return the log probabilities of one token per row, and of the others that the row wants. `logits` is
    [rows, vocabulary], as the model gave them; `token_ids` is [rows]. Nothing is evaluated."""
    values = logits.astype(mx.float32)
    total = mx.logsumexp(values, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(values, token_ids[:, None], axis=-1)
    ranks = mx.sum(values > chosen, axis=-1) + 1
    most = min(max(row.top_count for row in wanted), values.shape[-1])
    if most:
        top_ids = mx.argpartition(-values, kth=most - 1, axis=-1)[:, :most]
    else:
        top_ids = mx.zeros((len(wanted), 0), dtype=mx.uint32)
    most_asked = max(len(row.token_ids) for row in wanted)
    asked = [row.token_ids + (0,) * (most_asked - len(row.token_ids)) for row in wanted]
    asked_ids = mx.array(np.array(asked, dtype=np.uint32).reshape(len(wanted), most_asked))
    return LogprobArrays(
        token_ids=token_ids,
        logprobs=(chosen - total)[:, 0],
        ranks=ranks,
        top_token_ids=top_ids,
        top_logprobs=mx.take_along_axis(values, top_ids, axis=-1) - total,
        asked_logprobs=mx.take_along_axis(values, asked_ids, axis=-1) - total,
        wanted=tuple(wanted),
    )
