"""Speculative decoding as callers ask for it and hear of it."""

from __future__ import annotations

import dataclasses
import enum


class Drafting(enum.Enum):
    """How draft tokens are found."""

    PROMPT_LOOKUP = enum.auto()
    """What followed the last tokens where they stood before (Saxena 2023)."""
    DRAFT_MODEL = enum.auto()
    """The likeliest tokens of the server's draft model."""


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    """How a request wants to speculate."""

    draft_token_limit: int
    """Draft tokens a step, >= 1."""
    ngram_token_limit: int = 1
    """Prompt lookup: last tokens that are looked for, >= 1; fewer where so many are nowhere found."""
    drafting: Drafting = Drafting.PROMPT_LOOKUP


class SpeculationLimit(enum.Enum):
    """Why a request that asked for speculation decoded one token a step, or did so in the end."""

    NONE = enum.auto()
    CACHE = enum.auto()
    """The model has caches that cannot take rejected tokens back."""
    SAMPLING = enum.auto()
    """Each token's draw depends on the token before it: penalties, bad words or a response format."""
    NO_DRAFT_MODEL = enum.auto()
    """The server has no draft model."""
    ACCEPTANCE = enum.auto()
    """Hardly a guess was right of late, so the end was decoded plainly."""


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of one step, or of a whole request, and what became of them."""

    proposed_count: int = 0
    accepted_count: int = 0
    limit: SpeculationLimit = SpeculationLimit.NONE

    def plus(self, step: DraftCounts) -> DraftCounts:
        """Return the sum with a later step's, whose limit stands."""
        return DraftCounts(
            self.proposed_count + step.proposed_count, self.accepted_count + step.accepted_count, step.limit
        )


NO_DRAFTS = DraftCounts()
"""Of a request that did not ask, or has not begun."""
