"""Log probabilities of tokens, as the model gave them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """What a request wants to be told: of every output token, and of the prompt's if `of_prompt`."""

    top_count: int = 0
    """How many of the likeliest tokens to tell beside each one."""
    of_prompt: bool = False
    token_ids: tuple[int, ...] = ()
    """Tokens to tell in every place, likely or not. Inside the vocabulary."""


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """One token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token before it was drawn or read.

    Of the model's own distribution: temperature, filters, penalties, bias and constraints come after.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary; ties share the better rank."""
    top: tuple[Logprob, ...] = ()
    """The likeliest tokens, falling."""
    asked: tuple[Logprob, ...] = ()
    """The tokens asked for, in the order asked."""
    text_offset: int | None = None
    """Where its text begins in the output, in bytes of UTF-8. None for tokens of the prompt."""
