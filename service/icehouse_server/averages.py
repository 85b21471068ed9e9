"""Averages: quantiles of measured values, and moving averages of repeated measurements.

Each is defined only here, so that two tiers, or an engine and its client, never mean two things by p50.
"""

from __future__ import annotations

from collections.abc import Iterable

_RATE_WINDOW_S = 5.0
"""After this many seconds of samples an old rate weighs 1/e."""


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values are; 0 if there are none.

    Always one of the values, the higher one if two qualify: the median of two is the larger.
    """
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class MovingAverage:
    """An exponential moving average; 0 before the first sample, which it then equals."""

    __slots__ = ("value", "weight")

    def __init__(self, *, weight: float = 0.2) -> None:
        self.value = 0.0
        self.weight = weight
        """The weight of a new sample, 0 to 1."""

    def add(self, sample: float) -> float:
        """Add a sample and return the average."""
        return self._add(sample, self.weight)

    def add_rate(self, amount: float, *, elapsed_s: float) -> float:
        """Add a rate, weighted by its duration, and return the average.

        Two threads that call this at once may lose one sample, which an average tolerates.
        """
        if elapsed_s <= 0 or amount == 0:
            return self.value
        return self._add(amount / elapsed_s, 1.0 - _exp(-elapsed_s / _RATE_WINDOW_S))

    def _add(self, sample: float, weight: float) -> float:
        self.value = self.value + weight * (sample - self.value) if self.value else sample
        return self.value


def _exp(power: float) -> float:
    """Return e to a power of 0 or less, using only products and quotients.

    Rates decide who is refused and what is loaded, and the last bit of libm's exponential differs between
    processors.
    """
    part = max(power, -50.0) / 1024.0  # e to anything less is negligible beside 1
    square = part * part / 12.0
    result = (1.0 + part / 2.0 + square) / (1.0 - part / 2.0 + square)  # Padé's approximant
    for _ in range(10):
        result *= result
    return result
