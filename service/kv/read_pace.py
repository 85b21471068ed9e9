"""How much of its time a reader takes while sequences decode on the same cores.

A forward pass on the CPU waits for the slowest of its threads, so whatever else runs for 10 ms makes that
step 10 ms longer. Spread over several steps the same reading is hardly felt; what is read waits longer.
"""

from __future__ import annotations

from collections.abc import Callable

from service.clock import Clock

_PIECE_S = 0.003
"""A reader works about so long without a pause: more of them wake up more often than decode likes."""


class ReadPace:
    """Pauses one reader so that it works `share` of its time; 1 never pauses."""

    def __init__(self, clock: Clock, *, share: float, pause: Callable[[float], object]) -> None:
        assert 0.0 < share <= 1.0, share
        self._clock = clock
        self._share = share
        self._pause = pause
        self._began_s = clock.monotonic()

    def keep(self) -> None:
        """Pause if a piece of work was done since the last pause."""
        if self._share == 1.0:
            return
        worked_s = self._clock.monotonic() - self._began_s
        if worked_s >= _PIECE_S:
            self._pause(worked_s * (1.0 / self._share - 1.0))
            self._began_s = self._clock.monotonic()
