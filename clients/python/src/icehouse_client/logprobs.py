"""Log probabilities of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from icehouse.v1 import logprobs_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that could have stood in some place."""

    token_id: int
    logprob: float
    piece: str


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token; `rank` is 1 for the likeliest, `top` the likeliest ones,
    `asked` those that `logprob_token_ids` names."""

    token_id: int
    logprob: float
    rank: int
    piece: str
    top: tuple[TopLogprob, ...] = ()
    asked: tuple[TopLogprob, ...] = ()
    text_offset: int | None = None
    """Where its text begins in the output as it was generated, in bytes of UTF-8; None in the prompt."""


def logprobs_from(entries: Iterable[logprobs_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return messages as plain data."""
    return tuple(
        TokenLogprobs(
            entry.token_id,
            entry.logprob,
            entry.rank,
            entry.piece,
            _places(entry.top),
            _places(entry.asked),
            entry.text_offset if entry.HasField("text_offset") else None,
        )
        for entry in entries
    )


def _places(entries: Iterable[logprobs_pb2.TopLogprob]) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(entry.token_id, entry.logprob, entry.piece) for entry in entries)
