"""Averages: quantiles of what was measured, and moving averages of what is measured again and again.

The one definition of each, so that two tiers, or an engine and its client, never mean two things by p50.
"""

from __future__ import annotations

from collections.abc import Iterable

_RATE_WINDOW_S = 5.0
"""Seconds of samples after which an old rate weighs 1/e."""


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value that `share` (0 to 1) of the values lie below; 0 where there are none.

    Always one of the values, the higher one of the two in question: of two, the median is the larger.
    """
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class MovingAverage:
    """An exponential moving average; 0 before the first sample, which counts whole."""

    __slots__ = ("value", "weight")

    def __init__(self, *, weight: float = 0.2) -> None:
        self.value = 0.0
        self.weight = weight
        """Of a new sample, 0 to 1."""

    def add(self, sample: float) -> float:
        """Take a sample in and return the average."""
        return self._add(sample, self.weight)

    def add_rate(self, amount: float, *, elapsed_s: float) -> float:
        """Take in a rate, weighted by the time it was kept up, and return the average.

        Two threads at once may lose one sample, which an average can bear.
        """
        if elapsed_s <= 0 or amount == 0:
            return self.value
        return self._add(amount / elapsed_s, 1.0 - _exp(-elapsed_s / _RATE_WINDOW_S))

    def _add(self, sample: float, weight: float) -> float:
        self.value = self.value + weight * (sample - self.value) if self.value else sample
        return self.value


def _exp(power: float) -> float:
    """Return e to a power of 0 or less, of products and quotients alone.

    Rates decide who is refused and what is loaded, and libm's exponential differs from processor to processor
    in the last bit.
    """
    part = max(power, -50.0) / 1024.0  # what is less is nothing beside 1
    square = part * part / 12.0
    result = (1.0 + part / 2.0 + square) / (1.0 - part / 2.0 + square)  # Padé's approximant
    for _ in range(10):
        result *= result
    return result
