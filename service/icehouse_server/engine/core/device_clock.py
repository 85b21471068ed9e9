"""Device clock: when the device was seen to finish the work of all models of a process (inference thread).

A device works in the order in which it was given work, whichever model it is for. So a pass begins when the
work before it ends, which may be another model's.
"""

from __future__ import annotations


class DeviceClock:
    """Measures how long the device spent on each pass, across all models that share it. Times are
    `Clock.monotonic` readings."""

    __slots__ = ("_ended", "_ended_time", "_given")

    def __init__(self) -> None:
        self._given = 0
        self._ended = 0
        """The latest work that was seen to end; everything given before it has ended, too."""
        self._ended_time = 0.0

    def begin(self) -> int:
        """Count a piece of work, of any model, in the order in which the device is given it."""
        self._given += 1
        return self._given

    def end(self, number: int, *, began_time: float, now: float) -> float:
        """Note that a piece of work was seen to end. Return how long it took, from the end of the work before
        it or from `began_time`, whichever is later. Return 0 if later work was seen to end first: then its
        time is unknown."""
        if number < self._ended:
            return 0.0
        began_time = max(began_time, self._ended_time)
        self._ended, self._ended_time = number, now
        return now - began_time

    def note_other(self, now: float) -> None:
        """Note work that was waited for but is no pass, such as a part of loading a model."""
        self.end(self.begin(), began_time=now, now=now)
