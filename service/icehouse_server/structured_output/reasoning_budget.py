"""Reasoning budget: a constraint that ends an output's reasoning, and applies the form after it.

Within reasoning every token is allowed until the budget is used up; then only the tokens of the model's own
end marker are. Tokens are counted by the text, as in the output's usage.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from icehouse_server.domain.response_format import Constraint, Grammar
from icehouse_server.errors import IcehouseError
from icehouse_server.structured_output.matcher import MASK_BITS, Mask
from icehouse_server.text.detokenizer import Decode, Detokenizer
from icehouse_server.text.reasoning import ReplyReasoning


class FormScope(enum.Enum):
    """Which part of an output a form applies to."""

    WHOLE = enum.auto()
    """All of it: the form itself includes reasoning."""
    ANSWER = enum.auto()
    """What follows the reasoning, if there is any."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """A grammar of outputs with reasoning. Immutable; any number of outputs may start from it."""

    reasoning: ReplyReasoning
    token_limit: int | None
    """Most tokens of reasoning; None for no limit. A limit needs an end marker that tokens can spell."""
    form: Grammar | None
    scope: FormScope
    decode: Decode
    """Decodes tokens without hiding the markers."""
    prompt_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    """Tokens that end an output; not allowed before the answer's form has begun."""
    vocabulary_size: int

    def start(self) -> ReasoningConstraint:
        """Return a constraint for a new output."""
        return ReasoningConstraint(self)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """JSON pointers of the keywords in the form's schemas that are not enforced."""
        return () if self.form is None else self.form.unenforced


class ReasoningConstraint:
    """The state of one sequence: its reasoning and its form."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._meter = budget.reasoning.meter()
        self._detokenizer = Detokenizer(budget.decode, budget.prompt_token_ids)
        self._form: Constraint | None = None if budget.form is None else budget.form.start()
        self._forced: list[int] = []
        """Tokens that must come next, in order."""
        may_begin_reasoning = budget.token_limit and budget.reasoning.start_token_ids
        may_reason = self._meter.is_open or may_begin_reasoning
        self._has_form_begun = budget.scope is FormScope.WHOLE or not may_reason
        """Whether the form applies to the next token. Also True if there is no form."""
        self._close_when_spent()

    @property
    def is_finished(self) -> bool:
        return self._has_form_begun and self._form is not None and self._form.is_finished

    @property
    def error(self) -> IcehouseError | None:
        return None if self._form is None else self._form.error

    @property
    def allows_any(self) -> bool:
        return self._form is None and not self._forced

    def allows(self, token_id: int) -> bool:
        if (forced := self._forced_token()) is not None:
            return token_id == forced
        if self._form is None:
            return True
        if self._has_form_begun:
            return self._form.allows(token_id)
        if self._meter.is_open:
            return token_id not in self._budget.end_token_ids
        return token_id == self._budget.reasoning.start_token_ids[0] or self._form.allows(token_id)

    def allowed_tokens(self) -> Mask:
        if (forced := self._forced_token()) is not None:
            return _with(self._no_tokens(), forced)
        if self._form is None:
            return ~self._no_tokens()
        if self._has_form_begun:
            return self._form.allowed_tokens()
        if self._meter.is_open:
            mask = ~self._no_tokens()
            for token_id in self._budget.end_token_ids:
                if token_id >= self._budget.vocabulary_size:
                    continue  # a model's folder may list one outside its vocabulary
                mask[token_id // MASK_BITS] &= ~np.uint32(1 << token_id % MASK_BITS)
            return mask
        return _with(self._form.allowed_tokens().copy(), self._budget.reasoning.start_token_ids[0])

    def accept(self, token_id: int) -> None:
        """Take the token that was drawn."""
        was_open = self._meter.is_open
        self._meter.push(self._detokenizer.push(token_id))
        if self._form is not None and self._has_form_begun:
            self._form.accept(token_id)
        elif not was_open and not self._meter.is_open:
            self._begin(token_id)
        if self._forced:
            # If the form did not allow the forced token, another one was drawn.
            self._forced = self._forced[1:] if token_id == self._forced[0] else []
        if was_open and not self._meter.is_open:
            self._has_form_begun = True
        self._close_when_spent()

    def _begin(self, token_id: int) -> None:
        """Take a token before the answer that is not reasoning and does not complete its start marker."""
        if self._forced:
            return
        start = self._budget.reasoning.start_token_ids
        if self._form is not None and token_id == start[0]:
            self._forced = list(start)
            return
        self._has_form_begun = True
        if self._form is not None:
            self._form.accept(token_id)

    def _close_when_spent(self) -> None:
        limit = self._budget.token_limit
        if limit is None or self._forced or not self._meter.is_open or self._is_answering:
            return
        if self._meter.token_count >= limit:
            self._forced = list(self._budget.reasoning.end_token_ids)

    @property
    def _is_answering(self) -> bool:
        """Whether the answer's form applies now; markers mean nothing within it."""
        has_form = self._form is not None and self._has_form_begun
        return has_form and self._budget.scope is FormScope.ANSWER

    def _forced_token(self) -> int | None:
        """Return the token that must come next; None if none must, or the whole output's form forbids it."""
        if not self._forced:
            return None
        form = self._form if self._budget.scope is FormScope.WHOLE else None
        return self._forced[0] if form is None or form.allows(self._forced[0]) else None

    def _no_tokens(self) -> Mask:
        return np.zeros(-(-self._budget.vocabulary_size // MASK_BITS), dtype=np.uint32)


def _with(mask: Mask, token_id: int) -> Mask:
    mask[token_id // MASK_BITS] |= np.uint32(1 << token_id % MASK_BITS)
    return mask
