"""Speculation of one row: where its guesses come from, whether they pay, and when it stops guessing.

A row whose guesses come to nothing feeds one token per pass like other rows. A row that looks its guesses up
goes on looking silently, and guesses again once enough of its silent guesses have been right. Inference
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from icehouse_server.domain.request import DraftCounts, Drafting, Speculation, SpeculationLimit
from icehouse_server.engine.runner.draft_model import DraftedRow, DraftModel
from icehouse_server.engine.sampling.sampling_row import SamplingRow

Guesses = Sequence[int] | mx.array
"""Tokens that may come next; an array need not be computed yet."""


class Probe(NamedTuple):
    """How many guesses must be right in how many passes. With fewer, guessing costs more than it brings."""

    step_count: int
    least_accepted_count: int


_LOOKUP_PROBE = Probe(step_count=4, least_accepted_count=2)
"""Short, since a row that stops too early comes back. A pass over nine tokens takes twice as long as over one
(Gemma 3 270M, float32, 2 x86 cores), so a few right guesses gain nothing even for a lone row."""
_DRAFT_PROBE = Probe(step_count=24, least_accepted_count=6)
"""Long, since looking on silently would cost as much as guessing."""
_FIRST_WINDOW = 4
"""Guesses that a row begins with. If all were right it guesses twice as many, else one more than were right:
a text that quotes has its whole window after two passes, and others waste little. A pass over five tokens
costs little more than over three, and 64 quoted tokens take five passes, not six."""
GUESS_LIMIT = 64
"""Guesses in one pass, shared by all rows that guess: each makes the pass longer, also for rows that do not
guess. This many cost as much as 64 more decoding rows, which a batch is made for."""

_FIRST_RUN = 4
"""How many tokens in a row must be guessed right silently before the row guesses again; twice as many each
time that did not pay."""
_PAID_RUNS = 2
"""Guessing paid if this many times the run that led to it were accepted."""


class PromptLookup:
    """Guesses what followed the last tokens before: prompt lookup decoding (A. Saxena, 2023).

    Texts that quote their prompt, such as edits, extracts and code, repeat long runs of it. A lookup is a few
    passes over an array of all tokens so far: with 30,000 of them, about 20 microseconds per pass.
    """

    def __init__(self, token_ids: Sequence[int], *, ngram_token_limit: int) -> None:
        assert token_ids and ngram_token_limit >= 1
        self._ngram_token_limit = ngram_token_limit
        self._count = len(token_ids)
        self._tokens: npt.NDArray[np.int64] = np.empty(self._count + 256, dtype=np.int64)
        self._tokens[: self._count] = token_ids

    def extend(self, token_ids: Sequence[int]) -> None:
        stop = self._count + len(token_ids)
        if stop > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(max(stop, 256), dtype=np.int64)])
        self._tokens[self._count : stop] = token_ids
        self._count = stop

    def propose(self, count: int) -> list[int]:
        """Return at most `count` tokens that may come next: those after the earlier position with the longest
        matching end; among equals, the latest with `count` tokens after it. Empty if the last token is
        new."""
        known = self._tokens[: self._count]
        # Ends of earlier positions; nothing follows the very last token.
        ends = np.flatnonzero(known[:-1] == known[-1])
        for length in range(2, min(self._ngram_token_limit, self._count - 1) + 1):
            longer = ends[ends >= length - 1]
            longer = longer[known[longer - (length - 1)] == known[-length]]
            if not len(longer):
                break
            ends = longer
        if not len(ends) or count < 1:
            return []
        full = ends[ends + count < self._count]
        # In a short loop, few tokens follow the latest position; most follow the earliest.
        start = int(full[-1] if len(full) else ends[0]) + 1
        return [int(token_id) for token_id in known[start : start + count]]


class SpeculatingRow:
    """How one row that asked for speculation guesses, and how well."""

    def __init__(
        self,
        speculation: Speculation,
        token_ids: Sequence[int],
        *,
        limit: SpeculationLimit,
        drafted: DraftedRow | None = None,
    ) -> None:
        """`limit` says why it cannot guess from the start; `drafted` are its draft caches, if it has any."""
        self.limit = limit
        self.drafted = drafted
        self.draft_token_limit = speculation.draft_token_limit
        self._window = min(_FIRST_WINDOW, speculation.draft_token_limit)
        self._lookup: PromptLookup | None = None
        """Knows every token so far."""
        self._right_run = self._wanted_run = 0
        """Tokens in a row that were guessed right silently, and how many are needed."""
        self._step_count = self._accepted_count = self._accepted_total = 0
        self._wait_count = 0
        if limit is SpeculationLimit.NONE and drafted is None:
            self._lookup = PromptLookup(token_ids, ngram_token_limit=speculation.ngram_token_limit)

    @property
    def is_guessing(self) -> bool:
        """Whether its next tokens are to be guessed."""
        return self.limit is SpeculationLimit.NONE

    def look_up(self, count: int) -> list[int]:
        """Return at most `count` guesses, if the row looks them up."""
        return self._lookup.propose(min(count, self._window)) if self._lookup else []

    def note_wait(self) -> None:
        """Note a pass that fed other rows while this row waited for the outcome of its guesses."""
        self._wait_count += 1

    def take(
        self, token_ids: Sequence[int], *, guess_count: int, accepted_count: int, was_asked: bool = True
    ) -> DraftCounts:
        """Take what was drawn in a pass and how its guesses fared; return the counts to report. `was_asked`:
        whether the row was to guess in this pass."""
        if self.drafted is not None:
            self.drafted.behind += token_ids
        if not self.is_guessing:
            self._look_on(token_ids)
            return DraftCounts(limit=self.limit)
        if self._lookup is not None:
            self._lookup.extend(token_ids)
        if guess_count:
            wider = 2 * self._window if accepted_count == guess_count else accepted_count + 1
            self._window = min(wider, self.draft_token_limit)
        if guess_count or (was_asked and self.drafted is None):
            self._try(accepted_count - self._wait_count)
        self._wait_count = 0
        return DraftCounts(guess_count, accepted_count)

    def _try(self, accepted_count: int) -> None:
        """Judge by the number of right guesses, minus what the row would have drawn while it waited."""
        probe = _LOOKUP_PROBE if self.drafted is None else _DRAFT_PROBE
        self._step_count += 1
        self._accepted_count += accepted_count
        self._accepted_total += accepted_count
        if self._step_count < probe.step_count:
            return
        if self._accepted_count < probe.least_accepted_count:
            self.limit = SpeculationLimit.ACCEPTANCE
            self.drafted = None  # it does not look on silently, and its caches would only fall behind
            has_paid = self._accepted_total >= _PAID_RUNS * self._wanted_run
            self._wanted_run = _FIRST_RUN if has_paid else max(_FIRST_RUN, 2 * self._wanted_run)
            self._right_run = 0
        self._step_count = self._accepted_count = 0

    def _look_on(self, token_ids: Sequence[int]) -> None:
        """Guess silently while the row decodes plainly, to see when guesses would be right again."""
        if self._lookup is None:
            return
        for token_id in token_ids:
            is_right = self._lookup.propose(1) == [token_id]
            self._right_run = self._right_run + 1 if is_right else 0
            self._lookup.extend([token_id])
        if self._right_run >= self._wanted_run:
            self.limit = SpeculationLimit.NONE
            self._window = self.draft_token_limit
            self._step_count = self._accepted_count = self._accepted_total = 0


def limit_of(
    speculation: Speculation, sampling: SamplingRow, *, can_take_back: bool, draft_model: DraftModel | None
) -> SpeculationLimit:
    """Return why a row cannot speculate from the start; NONE if it can."""
    if sampling.needs_tokens:
        return SpeculationLimit.SAMPLING
    if not can_take_back:
        return SpeculationLimit.CACHE
    if speculation.drafting is Drafting.DRAFT_MODEL and draft_model is None:
        return SpeculationLimit.NO_DRAFT_MODEL
    return SpeculationLimit.NONE


def guesses_of(
    rows: Sequence[SpeculatingRow], draft_model: DraftModel | None
) -> tuple[list[Guesses], list[object]]:
    """Return each row's guesses, and what else must be evaluated."""
    if not rows:
        return [], []
    share = max(1, GUESS_LIMIT // len(rows))
    drafting = [(i, row.drafted) for i, row in enumerate(rows) if row.drafted is not None]
    guesses: list[Guesses] = [row.look_up(share) for row in rows]
    if not drafting:
        return guesses, []
    assert draft_model is not None
    ready = [i for i, drafted in drafting if not drafted.is_behind]
    count = min(share, max((rows[i].draft_token_limit for i in ready), default=0))
    proposed, arrays = draft_model.propose([drafted for _, drafted in drafting], count=count)
    if proposed is not None:
        for number, i in enumerate(ready):
            guesses[i] = proposed[number, : rows[i].draft_token_limit]
    return guesses, arrays
