"""Matcher: constrains an output to a grammar with llguidance: which tokens may follow, when it is complete.

A compiled grammar is made on another thread and is immutable. A constraint started from it belongs to one
sequence and is used only on the inference thread; no mlx here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from icehouse_server.domain.response_format import Constraint
from icehouse_server.errors import InvalidRequest, Reason

MASK_BITS = 32
"""Tokens in a word of a mask."""

Mask = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar whose first step has been computed once, so that every output starts warm."""

    matcher: LLMatcher
    executor: LLExecutor
    vocabulary_size: int
    unenforced: tuple[str, ...] = ()
    """JSON pointers of the keywords in its schemas that are not enforced."""

    def start(self) -> MatcherConstraint:
        """Return a constraint for a new output; copying takes some 40 microseconds."""
        return MatcherConstraint(self.matcher.deep_copy(), self.executor, self.vocabulary_size)


class MatcherConstraint:
    """The state of one sequence in its grammar."""

    allows_any = False

    def __init__(self, matcher: LLMatcher, executor: LLExecutor, vocabulary_size: int) -> None:
        self.matcher = matcher
        self.executor = executor
        self.word_count = -(-vocabulary_size // MASK_BITS)
        self.error: InvalidRequest | None = None
        """Set once a step has exceeded llguidance's limits, or the output has left the grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow; also True after a failure."""
        return self.matcher.is_stopped()

    def allows(self, token_id: int) -> bool:
        """Takes a microsecond; a mask of 262,144 tokens takes 500 (llguidance 1.9.1, one x86 core)."""
        return bool(self.matcher.validate_tokens([token_id]))

    def allowed_tokens(self) -> Mask:
        return fill_masks([self])[0]

    def accept(self, token_id: int) -> None:
        """Take the next token; tokens after the end change nothing."""
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)
            self.note_failure()

    def note_failure(self) -> None:
        """Note an error if the last call stopped the matcher before the output was complete.

        In that state llguidance allows the end tokens, so an unfinished output would look finished.
        """
        matcher = self.matcher
        if self.error is None and matcher.is_stopped() and (matcher.is_error() or not matcher.is_accepting()):
            detail = matcher.get_error().partition("\n")[0] or "no token of the vocabulary can follow"
            self.error = InvalidRequest(
                Reason.GRAMMAR_TOO_COMPLEX,
                f"the output cannot go on in its response_format: {detail}; simplify the format",
                field="response_format",
                metadata={"detail": detail},
            )


def fill_masks(constraints: Sequence[Constraint]) -> list[Mask]:
    """Return the mask of each constraint; those of llguidance are computed together, in parallel."""
    together = [c for c in constraints if isinstance(c, MatcherConstraint)]
    filled = iter(_fill(together))
    return [next(filled) if isinstance(c, MatcherConstraint) else c.allowed_tokens() for c in constraints]


def _fill(constraints: Sequence[MatcherConstraint]) -> Sequence[Mask]:
    if not constraints:
        return ()
    words = np.zeros((len(constraints), constraints[0].word_count), dtype=np.int32)
    if len(constraints) == 1:
        fill_next_token_bitmask(constraints[0].matcher, words)
    else:
        matchers = [(constraint.matcher, index) for index, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(constraints[0].executor, matchers, words)
    for constraint in constraints:
        constraint.note_failure()
    return list(words.view(np.uint32))
