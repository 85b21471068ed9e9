"""How long prefill chunks take, learned while they run, so that a chunk can be cut to a time.

A chunk costs something whatever its size (weights are read, the context is walked) and something for each
of its tokens, and both grow with the context: one straight line for each octave of context, fitted to the
latest chunks.
"""

from __future__ import annotations

import dataclasses

_FADING = 0.9
_SETTLED_WEIGHT = 4.0
_OUTLIER_FACTOR = 2.0
"""A chunk that took longer than so many times what was expected counts as if it had taken just that, so that
one hiccup does not shrink the chunks after it; what lasts is learned in a few."""
_LEAST_SLOPE_SHARE = 0.25
"""Least share of a chunk's time that is taken to grow with its tokens."""
_LEAST_SPREAD = 0.1
"""Sizes that vary by less than this share of their mean say nothing about the slope."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds of a chunk: `fixed_s` plus `token_s` for each token."""

    fixed_s: float
    token_s: float

    def seconds(self, token_count: int) -> float:
        """Return what a chunk of this many tokens is expected to take."""
        return self.fixed_s + self.token_s * token_count

    def tokens_within(self, budget_s: float) -> float:
        """Return the tokens of a chunk that takes the budget; infinite where chunks cost nothing."""
        if self.token_s <= 0.0:
            return float("inf")
        return max(0.0, budget_s - self.fixed_s) / self.token_s

    def tokens_at_share(self, fixed_share: float) -> float:
        """Return the tokens of a chunk of whose time the fixed part is this share."""
        return self.fixed_s / self.token_s * (1.0 - fixed_share) / fixed_share if self.token_s > 0.0 else 0.0


@dataclasses.dataclass(slots=True)
class _Line:
    """Fading sums for a fit of seconds over tokens."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, token_count: int, elapsed_s: float) -> None:
        if self.weight >= _SETTLED_WEIGHT:
            elapsed_s = min(elapsed_s, _OUTLIER_FACTOR * self.cost().seconds(token_count))
        self.weight = self.weight * _FADING + 1.0
        self.tokens = self.tokens * _FADING + token_count
        self.seconds = self.seconds * _FADING + elapsed_s
        self.tokens_squared = self.tokens_squared * _FADING + token_count**2
        self.tokens_seconds = self.tokens_seconds * _FADING + token_count * elapsed_s

    def cost(self) -> ChunkCost:
        mean_tokens, mean_s = self.tokens / self.weight, self.seconds / self.weight
        steepest = mean_s / mean_tokens
        variance = self.tokens_squared / self.weight - mean_tokens**2
        slope = steepest
        if variance > (_LEAST_SPREAD * mean_tokens) ** 2:
            covariance = self.tokens_seconds / self.weight - mean_tokens * mean_s
            slope = min(steepest, max(_LEAST_SLOPE_SHARE * steepest, covariance / variance))
        return ChunkCost(max(0.0, mean_s - slope * mean_tokens), slope)


class PrefillPace:
    """Expects the cost of a chunk from the chunks before it."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def note(self, *, token_count: int, context_token_count: int, elapsed_s: float) -> None:
        """Learn from a chunk that ran on top of `context_token_count` tokens."""
        assert token_count > 0, token_count
        self._lines.setdefault(_octave(context_token_count), _Line()).add(token_count, elapsed_s)

    def cost(self, context_token_count: int) -> ChunkCost | None:
        """Return the expected cost at this context, or at the nearest one known; None when none is."""
        if not self._lines:
            return None
        wanted = _octave(context_token_count)
        # Of two equally near ones the longer context: a chunk too small does less harm than one too long.
        nearest = min(self._lines, key=lambda octave: (abs(octave - wanted), -octave))
        return self._lines[nearest].cost()


def _octave(token_count: int) -> int:
    """Contexts of up to 128 tokens share a line, as do those of each doubling after it."""
    return max(7, token_count.bit_length())
