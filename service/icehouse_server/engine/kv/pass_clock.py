"""Pass clock: which passes the device was given and which of them have ended, as numbers (inference thread).

A device does its work in the order it came in. So whatever was dispatched before pass N has ended once N has,
and memory that nobody but passes up to N reads may be written to once N has ended.
"""

from __future__ import annotations


class PassClock:
    """Counts passes from 1 on. The pipeline moves it; others only read it."""

    __slots__ = ("dispatched", "ended")

    def __init__(self) -> None:
        self.dispatched = 0
        """Number of the last pass that was dispatched or is being built; 0 before the first one."""
        self.ended = 0
        """All passes up to this number have ended."""

    def dispatch(self) -> int:
        """Count a pass that is built and then given to the device; return its number."""
        self.dispatched += 1
        return self.dispatched

    def end(self, number: int) -> None:
        """Note that a pass, and with it all before, has been waited for."""
        assert self.ended < number <= self.dispatched, (self.ended, number, self.dispatched)
        self.ended = number
