"""Device clock: when the device was seen to end what all models of a process gave it (inference thread).

A device does its work in the order it came in, whichever model it is of. So a pass begins where the work
before it ends, which may be another model's.
"""

from __future__ import annotations


class DeviceClock:
    """How long the device was at each pass, of all the models that share it. Times are `Clock.monotonic`
    readings."""

    __slots__ = ("_ended", "_ended_time", "_given")

    def __init__(self) -> None:
        self._given = 0
        self._ended = 0
        """The last of all work that was seen to end, and so whatever was given before it."""
        self._ended_time = 0.0

    def begin(self) -> int:
        """Count a piece of work, of whichever model, in the order in which the device is given it."""
        self._given += 1
        return self._given

    def end(self, number: int, *, began_time: float, now: float) -> float:
        """Note that a piece of work was seen to end; return how long it took from the end of what came
        before, or from `began_time` where that was later. 0 where work that was given later was seen to end
        before: then nobody knows."""
        if number < self._ended:
            return 0.0
        began_time = max(began_time, self._ended_time)
        self._ended, self._ended_time = number, now
        return now - began_time

    def note_other(self, now: float) -> None:
        """Note work that was waited for and is no pass, such as a part of a model's loading."""
        self.end(self.begin(), began_time=now, now=now)
