"""What keeps an output inside a form: a compiled grammar, and its use by one sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from service.errors import IcehouseError


class Constraint(Protocol):
    """Says which tokens may come next. One per sequence and join, used on the inference thread only.

    A sequence that was parked brings a fresh one, which is then told the output so far again.
    """

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: nothing may follow, and `allowed_tokens` is not asked again."""
        ...

    @property
    def error(self) -> IcehouseError | None:
        """Why it cannot say any more what may follow; its sequence then ends with this."""
        ...

    def allows(self, token_id: int) -> bool:
        """Say whether one token may come next, for far less than `allowed_tokens` costs.

        Where only one text can follow, `allowed_tokens` may name one spelling of it and this allow others;
        what `allowed_tokens` names is always allowed.
        """
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


class Grammar(Protocol):
    """A form ready for use. Never changes; any number of sequences on any thread may start from it."""

    def start(self) -> Constraint:
        """Return a constraint at the beginning of an output, owned by the caller's thread."""
        ...
