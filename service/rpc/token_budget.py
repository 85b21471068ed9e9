"""Tokens per minute for one tenant: a bucket that fills steadily and may be drawn below empty.

A request reserves its prompt and all the output it may ask for, so that many at once cannot overdraw
together; what it did not use goes back at its end. One that asks for more than a whole bucket is let
in when the bucket is full: it then owes the rest, and the next ones wait for that.
"""

from __future__ import annotations

from service.clock import Clock

_MINUTE_S = 60.0


class TokenBudget:
    """One tenant's bucket. Owned by the event loop."""

    def __init__(self, *, tokens_per_minute: int, clock: Clock) -> None:
        assert tokens_per_minute > 0
        self.limit = tokens_per_minute
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._level_time = clock.monotonic()

    @property
    def level(self) -> int:
        """Tokens there now; below zero while more was used than has come back."""
        self._fill()
        return int(self._level)

    def wait_s(self, token_count: int) -> float:
        """Return how long until so many tokens may be reserved; 0 when they may be now."""
        self._fill()
        missing = min(token_count, self.limit) - self._level
        return max(0.0, missing * _MINUTE_S / self.limit)

    def reserve(self, token_count: int) -> None:
        """Take tokens out, beyond the bottom if need be."""
        self._fill()
        self._level -= token_count

    def give_back(self, token_count: int) -> None:
        """Put back what was reserved and not used."""
        self._fill()
        self._level = min(self.limit, self._level + token_count)

    def _fill(self) -> None:
        now = self._clock.monotonic()
        gained = (now - self._level_time) * self.limit / _MINUTE_S
        self._level = min(self.limit, self._level + gained)
        self._level_time = now
