"""Pace of layers: what a chunk's layers take beside rows, and what the rows take, of what was expected.

While a prompt goes through the layers a few in each pass, no pass shows what the rows take by themselves, and
they grow. Passes with more layers and with fewer tell the two apart, starting from what was known before: the
most likely factors, where either and each pass are off by some share. Each pass counts by what it is off of
its own time, so that one which others' work made ten times as long says next to nothing.
"""

from __future__ import annotations

import collections
from typing import Final

_PASSES_KEPT: Final = 12
_PASS_ERROR: Final = 0.1
_ROWS_ERROR: Final = 0.2
_LAYERS_ERROR: Final = 0.2
"""Usual errors of what was expected of a pass, and of what was known of its rows and its layers before."""
_LEAST_SHARE: Final = 0.25
"""Of what was expected of a pass: none takes less."""
_ROWS_LIMITS: Final = (0.7, 2.0)
_LAYERS_LIMITS: Final = (0.7, 3.0)
"""Beyond these something else was measured."""


class LayerPace:
    """Two factors: 1 where something takes what was expected of it."""

    def __init__(self) -> None:
        self._passes: collections.deque[tuple[float, float]] = collections.deque(maxlen=_PASSES_KEPT)
        """Seconds expected of the rows and of the layers, of those that the pass took."""
        self._known_layers = 1.0
        self.rows = 1.0
        self.layers = 1.0

    def note(self, rows_s: float, layers_s: float, elapsed_s: float) -> None:
        """Learn from a pass in which both ran: what was expected of them, and what it took."""
        elapsed_s = max(elapsed_s, _LEAST_SHARE * (rows_s + layers_s))
        self._passes.append((rows_s / elapsed_s, layers_s / elapsed_s))
        weight, rows_prior, layers_prior = (e**-2 for e in (_PASS_ERROR, _ROWS_ERROR, _LAYERS_ERROR))
        rows_rows = weight * sum(rows * rows for rows, _ in self._passes) + rows_prior
        rows_layers = weight * sum(rows * layers for rows, layers in self._passes)
        layers_layers = weight * sum(layers * layers for _, layers in self._passes) + layers_prior
        rows_wanted = weight * sum(rows for rows, _ in self._passes) + rows_prior
        layers_wanted = weight * sum(layers for _, layers in self._passes) + layers_prior * self._known_layers
        divisor = rows_rows * layers_layers - rows_layers**2
        found_rows = (rows_wanted * layers_layers - layers_wanted * rows_layers) / divisor
        found_layers = (layers_wanted * rows_rows - rows_wanted * rows_layers) / divisor
        self.rows = _within(found_rows, _ROWS_LIMITS)
        self.layers = _within(found_layers, _LAYERS_LIMITS)

    def note_rows_alone(self) -> None:
        """Rows run by themselves again: what they take is known, and only the layers' pace is kept."""
        if self._passes:
            self._passes.clear()
            # A pace that lets no chunk begin is not measured again: it is half forgotten.
            self._known_layers = self.layers = (1.0 + self.layers) / 2.0
            self.rows = 1.0


def _within(value: float, limits: tuple[float, float]) -> float:
    least, most = limits
    return min(most, max(least, value))
