"""Breaker: whether a store that failed may be asked again.

After a few failures in a row it may not for a while, longer each time; then one request tries. Any thread
may look; one thread records.
"""

from __future__ import annotations

from icehouse_server.clock import Clock

_FAILURE_LIMIT = 3
_FIRST_PAUSE_S = 1.0
_LAST_PAUSE_S = 60.0


class Breaker:
    """Closed until three failures in a row; then it opens for one trial after each pause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failure_count = 0
        self._pause_s = _FIRST_PAUSE_S
        self._trial_time = 0.0
        self._detail = ""

    @property
    def pause_detail(self) -> str:
        """Why nothing is asked at present; empty while all is well."""
        return self._detail if self._failure_count >= _FAILURE_LIMIT else ""

    @property
    def pause_left_s(self) -> float:
        """For how long nothing may be asked; 0 when something may."""
        if self._failure_count < _FAILURE_LIMIT:
            return 0.0
        return max(0.0, self._trial_time - self._clock.monotonic())

    def begin(self) -> bool:
        """Return whether a request may be sent now; while all is not well, one for each pause."""
        if self.pause_left_s > 0.0:
            return False
        if self._failure_count >= _FAILURE_LIMIT:
            self._trial_time = self._clock.monotonic() + self._pause_s
        return True

    def succeed(self) -> None:
        """Note an answer."""
        self._failure_count, self._pause_s, self._detail = 0, _FIRST_PAUSE_S, ""

    def fail(self, detail: str) -> bool:
        """Note a failure; True where it begins a pause after all had been well."""
        self._failure_count += 1
        self._detail = detail
        if self._failure_count < _FAILURE_LIMIT:
            return False
        self._trial_time = self._clock.monotonic() + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, _LAST_PAUSE_S)
        return self._failure_count == _FAILURE_LIMIT
