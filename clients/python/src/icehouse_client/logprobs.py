"""Log probabilities of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from icehouse.v1 import logprobs_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens in some place."""

    token_id: int
    logprob: float
    piece: str


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token; `rank` is 1 for the likeliest, `top` the likeliest ones."""

    token_id: int
    logprob: float
    rank: int
    piece: str
    top: tuple[TopLogprob, ...] = ()


def logprobs_from(entries: Iterable[logprobs_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return messages as plain data."""
    return tuple(
        TokenLogprobs(
            entry.token_id,
            entry.logprob,
            entry.rank,
            entry.piece,
            tuple(TopLogprob(top.token_id, top.logprob, top.piece) for top in entry.top),
        )
        for entry in entries
    )
