"""What the oldest prompt is owed while shorter ones overtake it (inference thread).

The shortest prompt runs first, so the oldest could starve. It is owed a share of all prefill time, counted in
seconds and not in turns: one turn of a long context can take as long as ten of a short one, and a prompt that
had the device to itself a moment ago has nothing to ask of those who come now.
"""

from __future__ import annotations

_SHARE = 0.25
"""Of the time of prefill, while shorter prompts wait."""
_CREDIT_LIMIT_S = 1.0
"""Most time of its own that is held against the oldest: shorter ones may go first for three times as long."""


class OldestShare:
    """A balance of seconds between the oldest prompt and all that overtake it."""

    def __init__(self) -> None:
        self._owed_s = 0.0

    def note(self, elapsed_s: float, *, was_oldest: bool) -> None:
        """Count a chunk of the oldest prompt, or of one that overtook it."""
        if was_oldest:
            self._owed_s = max(-_CREDIT_LIMIT_S, self._owed_s - elapsed_s)
        else:
            self._owed_s += elapsed_s * _SHARE / (1.0 - _SHARE)

    def is_due(self, cost_s: float) -> bool:
        """Whether a chunk of this cost is covered by what is owed."""
        return self._owed_s > 0.0 and self._owed_s >= cost_s
