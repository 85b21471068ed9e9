"""Sampling row: one sequence's sampling state while it decodes (inference thread)."""

from __future__ import annotations

import copy
from collections.abc import Collection

from icehouse_server.domain.request import DraftCounts
from icehouse_server.domain.response_format import Constraint
from icehouse_server.domain.sampling import SamplingParams
from icehouse_server.engine.core.decode_row import DecodeRow
from icehouse_server.engine.sampling.penalties import Bans, LogitEdits
from icehouse_server.errors import IcehouseError


class SamplingRow:
    """Parameters, the number of tokens drawn, and what depends on the tokens themselves."""

    __slots__ = (
        "bans",
        "constraint",
        "drafts",
        "drawn_count",
        "edits",
        "end_token_ids",
        "is_else_plain",
        "is_plain",
        "logprobs",
        "needs_tokens",
        "params",
    )

    def __init__(self, row: DecodeRow, *, end_token_ids: Collection[int] = ()) -> None:
        params = row.sampling
        self.params: SamplingParams = params
        self.drawn_count = len(row.output_token_ids)
        """Advanced by each draw, which on a pipelined device is before the token is known."""
        self.end_token_ids = tuple(dict.fromkeys((*end_token_ids, *params.stop_token_ids)))
        self.logprobs = row.logprobs
        self.constraint: Constraint | None = row.constraint
        if row.constraint is not None:
            for token_id in row.output_token_ids:
                row.constraint.accept(token_id)
        tokens = {"prompt_token_ids": row.prompt_token_ids, "output_token_ids": row.output_token_ids}
        self.edits = LogitEdits.of(params, **tokens)
        self.bans: Bans | None = None
        if params.banned or params.min_output_token_count:
            self.bans = Bans(params, end_token_ids=self.end_token_ids, **tokens)
        self.is_else_plain = self.edits is None and self.bans is None
        """The model's logits are taken as they are, but for a constraint."""
        self.is_plain = self.is_else_plain and self.constraint is None
        self.drafts: DraftCounts | None = None
        """What to tell of a row that asked for speculation and decodes without."""
        self.needs_tokens = (
            self.constraint is not None
            or (self.edits is not None and not self.edits.is_static)
            or (self.bans is not None and not self.bans.is_static)
        )
        """The next draw depends on the tokens drawn before it, so it waits until they are known."""

    def ahead(self, count: int) -> SamplingRow:
        """Return this row as it will be after `count` draws; only where it does not need their tokens."""
        assert not self.needs_tokens
        later = copy.copy(self)
        later.drawn_count += count
        return later

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether top_p, min_p or top_k exclude anything before XTC, if any, is applied."""
        params = self.params
        return params.top_p < 1.0 or params.min_p > 0.0 or (params.top_k > 0 and not self.has_late_top_k)

    @property
    def has_late_top_k(self) -> bool:
        """Whether top_k counts what XTC left, instead of sharing the sort of top_p."""
        return self.params.top_k > 0 and self.params.xtc_probability > 0.0

    @property
    def is_constrained(self) -> bool:
        """Whether the constraint has a say in the next draw."""
        constraint = self.constraint
        return constraint is not None and not (constraint.is_finished or constraint.allows_any)

    @property
    def is_complete(self) -> bool:
        """Whether the constraint lets nothing follow the tokens accepted so far."""
        return self.constraint is not None and self.constraint.is_finished

    @property
    def error(self) -> IcehouseError | None:
        """Why the constraint cannot go on."""
        return self.constraint.error if self.constraint is not None else None

    def allows(self, token_id: int) -> bool:
        """Whether the constraint, if there is one, lets a token come next."""
        return self.constraint is None or self.constraint.allows(token_id)

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was drawn and is known now."""
        if self.edits is not None:
            self.edits.accept(token_id)
        if self.bans is not None:
            self.bans.accept(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)
