"""What keeps one sequence's output inside a grammar, as the sampler sees it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """Says which tokens may come next. One per sequence and join, used on the inference thread only.

    A sequence that was parked brings a fresh one, which is then told the output so far again.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: nothing may follow, and `allowed_tokens` is not asked again."""
        ...

    def allowed_tokens(self) -> npt.NDArray[np.uint32]:
        """Return the tokens that may come next, one bit each: token i is bit i % 32 of word i // 32.

        At least one bit is set. Tokens behind the last word are not allowed. The array is read before
        the next call.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on behind a token that was drawn."""
        ...
