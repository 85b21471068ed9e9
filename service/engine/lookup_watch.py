"""Guessing in silence for a row that decodes plainly, to tell when guesses would come true again."""

from __future__ import annotations

from service.domain.speculation import Speculation
from service.engine.prompt_lookup import PromptLookup

_FIRST_RUN = 4
"""Tokens in a row that must be guessed right before the row goes back; after each stay that did not pay,
twice as many. Moving copies the row out of the batch and, when it comes again, all of the batch."""
_PAID_RUNS = 2
"""A stay paid when so many times the run that led to it were accepted."""


class LookupWatch:
    """Looks on while a row that left its speculative lane decodes in the batch."""

    def __init__(self, drafter: PromptLookup, speculation: Speculation) -> None:
        self.drafter = drafter
        self.speculation = speculation
        self._wanted_run = _FIRST_RUN
        self._stay_count = 0
        self._run = 0
        self._guess: int | None = None

    @property
    def is_convinced(self) -> bool:
        """Whether the latest tokens were guessed right, so many in a row that the next ones may be too."""
        return self._run >= self._wanted_run

    def begin(self, *, accepted_count: int) -> None:
        """Look on from here, after a stay in the lane in which so many guesses were right.

        The drafter knows every token that was told.
        """
        has_paid = accepted_count >= _PAID_RUNS * self._wanted_run
        self._wanted_run = _FIRST_RUN if has_paid or not self._stay_count else 2 * self._wanted_run
        self._stay_count += 1
        self._run = 0
        self._look()

    def note(self, token_id: int) -> None:
        """Take a token that was told."""
        self._run = self._run + 1 if token_id == self._guess else 0
        self.drafter.extend([token_id])
        self._look()

    def _look(self) -> None:
        self._guess = next(iter(self.drafter.propose(1)), None)
